# A program whose reader goes away ends by SIGPIPE, and Python's own write raises: as anywhere else.
import os
import signal
import subprocess

from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")


def dispositions():
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGPIPE)


def masks():
    command = ["bash", "-c", "grep -E 'Sig(Blk|Ign)' /proc/self/status"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@task(tags=TAGS)
def pipes():
    command = ["bash", "-c", "yes | head -n 1 >/dev/null; echo ${PIPESTATUS[0]}"]
    code = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        os.write(writing, b"x")
    except BrokenPipeError:
        return code - 128
    return 0


@task(tags=TAGS)
def looks():
    return dispositions(), masks()


@flow(task_runner=RUNNER)
def main():
    assert pipes.submit().result() == signal.SIGPIPE
    got = looks.submit().result()
    assert got == (dispositions(), masks()), got


if __name__ == "__main__":
    main()

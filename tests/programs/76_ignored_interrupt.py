# After nohup, or in the background of a script, Ctrl-C is ignored: by the flow, by its tasks and by what these start.
import os
import signal
import subprocess
import sys

from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")

PROGRAM = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"


@task(tags=TAGS)
def ignores():
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN, child.stdout.strip()


@flow(task_runner=RUNNER)
def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert ignores.submit().result() == (True, "True")


if __name__ == "__main__":
    main()

# A recorder under bash, a server and a tree of workers end gracefully when the task sends them SIGINT.
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time

from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")

BASH = "trap 'echo flushed; exit 7' INT; echo up; while :; do sleep 0.05; done"
SERVER = """
import signal, sys
try:
    print("up", flush=True)
    signal.pause()
except KeyboardInterrupt:
    print("flushed")
    sys.exit(7)
"""
# As launchers do: one worker in the group of the launcher, which waits for it.
LAUNCHER = f"""
import subprocess, sys
try:
    worker = subprocess.Popen([sys.executable, "-c", {SERVER!r}])
    worker.wait()
except KeyboardInterrupt:
    sys.exit(worker.wait())
"""


def ended(command):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "up\n"
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    return process.stdout.read().strip(), process.wait()


@task(tags=TAGS)
def tools():
    return [
        ended(each)
        for each in (
            ["bash", "-c", BASH],
            [sys.executable, "-c", SERVER],
            [sys.executable, "-c", LAUNCHER],
        )
    ]


@task(tags=TAGS)
def worker():
    process = mp.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    os.kill(process.pid, signal.SIGINT)
    process.join(20)
    process.kill()
    return process.exitcode


@flow(task_runner=RUNNER)
def main():
    assert tools.submit().result() == [("flushed", 7)] * 3
    assert worker.submit().result() in (1, -signal.SIGINT)


if __name__ == "__main__":
    main()

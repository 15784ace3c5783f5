# source: https://github.com/treeverse/dvc/pull/2271
import os
from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner
from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")

# A task starts a program and ends it gracefully with SIGINT, as one does with ffmpeg, tensorboard, vllm.
import signal, subprocess, sys, time, _thread


@task(tags=TAGS)
def record():
    p = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\ntry:\n  print('up', flush=True)\n  time.sleep(30)\nexcept KeyboardInterrupt:\n  print('saved')",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert p.stdout.readline() == "up\n"
    p.send_signal(signal.SIGINT)
    try:
        p.wait(8)
    except subprocess.TimeoutExpired:
        p.kill()
        return "SIGINT was ignored"
    return p.stdout.read().strip()


@flow(task_runner=RUNNER)
def main():
    got = record.submit().result()
    assert got == "saved", got


if __name__ == "__main__":
    main()

# source: https://github.com/PrefectHQ/prefect/issues/12083
import os
from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner
from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")


def check(*wanted):
    """Run a flow of tasks, each with what it must return; all failures are shown."""

    @flow(task_runner=RUNNER)
    def main():
        bad = {}
        for t, args, want in wanted:
            try:
                got = t.submit(*args).result()
                if got != want:
                    bad[t.name] = got
            except BaseException as e:
                bad[t.name] = f"{type(e).__name__}: {str(e)[:300]}"
        return bad

    bad = main()
    assert not bad, bad


# Objects that scripts keep in global variables and that their tasks use.
import threading, sqlite3, re, argparse, logging
import torch

log = logging.getLogger("mine")
args = argparse.Namespace(x=1)
pattern = re.compile("a+")
device = torch.device("cpu")
lock = threading.Lock()
local = threading.local()
event = threading.Event()


@task(tags=TAGS)
def use_plain():
    log.warning("hi")
    return args.x, bool(pattern.match("aa")), str(device)


@task(tags=TAGS)
def use_lock():
    with lock:
        return 1


@task(tags=TAGS)
def use_local():
    local.x = 1
    return local.x


@task(tags=TAGS)
def use_event():
    return event.is_set()


if __name__ == "__main__":
    check(
        (use_plain, (), (1, True, "cpu")),
        (use_lock, (), 1),
        (use_local, (), 1),
        (use_event, (), False),
    )

# source: https://github.com/python/cpython/issues/103061
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


# An exception of the script whose constructor takes other arguments than it passes on; the flow and a retry condition ask for its type.
import pathlib, tempfile

COUNT = pathlib.Path(tempfile.mkdtemp()) / "n"


class Busy(Exception):
    def __init__(self, code, *, host):
        super().__init__(f"{host} answered {code}")
        self.code = code
        self.host = host


def is_busy(task, run, state):
    return isinstance(
        state.data if isinstance(state.data, Exception) else state.result(raise_on_failure=False),
        Busy,
    )


@task(tags=TAGS, retries=1, retry_condition_fn=is_busy)
def call():
    n = int(COUNT.read_text()) if COUNT.exists() else 0
    COUNT.write_text(str(n + 1))
    raise Busy(503, host="h")


@flow(task_runner=RUNNER)
def main():
    try:
        call.submit().result()
    except Busy as e:
        return e.code, e.host, int(COUNT.read_text())
    except Exception as e:
        return f"{type(e).__name__}: {e}", int(COUNT.read_text())


if __name__ == "__main__":
    got = main()
    assert got == (503, "h", 2), got

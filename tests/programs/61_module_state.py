# source: https://github.com/cloudpipe/cloudpickle/issues/275
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


# Tasks of an importable module, with its module-level state (also https://github.com/ray-project/ray/issues/15946).
import lazy_model_mod as m

if __name__ == "__main__":
    check(
        (m.infer, (), "weights"),
        (m.guarded, (), 1),
        (m.remembers, (), [1]),
        (m.required, (), ["path"]),
        (m.required_by_name, (), ["path"]),
        (m.sentinel, (), True),
    )

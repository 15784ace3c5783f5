# source: https://github.com/PrefectHQ/prefect/issues/18254
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


from prefect.assets import Asset, materialize, add_asset_metadata

model = Asset(key="demo://model")


@materialize(model, tags=TAGS)
def train():
    model.add_metadata({"acc": 1})
    return 3


@materialize(model, tags=TAGS)
def train2():
    add_asset_metadata(model, {"acc": 1})
    return 3


if __name__ == "__main__":
    check((train, (), 3), (train2, (), 3))

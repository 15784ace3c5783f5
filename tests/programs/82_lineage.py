# Assets: what the body adds, what it reads of its context, and what is emitted when it completes and when it fails.
import os

from prefect import flow, task
from prefect.assets import Asset, AssetProperties, add_asset_metadata, materialize
from prefect.context import AssetContext
from prefect.events.worker import EventsWorker
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")

data = Asset(key="s3://bucket/data", properties=AssetProperties(name="data"))
model = Asset(key="s3://bucket/model")
EMITTED = []
send = EventsWorker.send


def note(self, item):
    if getattr(item, "event", "").startswith("prefect.asset."):
        EMITTED.append((item.event, item.resource.id, dict(item.payload)))
    send(self, item)


@materialize(data, by="dvc", tags=TAGS)
def load():
    data.add_metadata({"rows": 5})
    add_asset_metadata(data.key, {"kind": "csv"})
    return 5


@materialize(model, asset_deps=[data], tags=TAGS)
def train(rows, fails):
    context = AssetContext.get()
    model.add_metadata({"rows": rows})
    if fails:
        raise ValueError("no model")
    return context.materialized_by, [each.key for each in context.direct_asset_dependencies]


@task(tags=TAGS)
def plain():
    try:
        model.add_metadata({"x": 1})
    except ValueError as error:
        return str(error).partition(" to ")[0]


@flow(task_runner=RUNNER)
def main():
    EventsWorker.send = note
    rows = load.submit()
    assert train.submit(rows, False).result() == (None, [data.key])
    assert plain.submit().result() == "Can only add metadata"
    failed = train.submit(rows, True)
    failed.wait()
    assert failed.state.is_failed()


if __name__ == "__main__":
    main()
    of_data = [each for each in EMITTED if each[1] == data.key and "materialization" in each[0]]
    assert of_data == [
        ("prefect.asset.materialization.succeeded", data.key, {"rows": 5, "kind": "csv"})
    ], EMITTED
    of_model = [each for each in EMITTED if each[1] == model.key]
    assert of_model[0] == ("prefect.asset.materialization.succeeded", model.key, {"rows": 5})
    assert of_model[1][0] == "prefect.asset.materialization.failed"

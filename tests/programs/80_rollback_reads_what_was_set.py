# A task notes which file it wrote; the rollback hook removes that file when a later task of the transaction fails.
import os
import pathlib
import tempfile

from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner
from prefect.transactions import get_transaction, transaction

from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")

FOLDER = pathlib.Path(tempfile.mkdtemp())
REMOVED = []


class Checkpoint:
    def __init__(self, path):
        self.path = path


@task(tags=TAGS)
def write(name):
    path = FOLDER / name
    path.write_text("weights")
    # What the flow has set is read, what the task sets is its own.
    assert get_transaction().get("owner") == "flow"
    assert get_transaction().get("missing", 5) == 5
    get_transaction().set("checkpoint", Checkpoint(path))
    return str(path)


@write.on_rollback
def remove(txn):
    path = txn.get("checkpoint").path
    path.unlink()
    REMOVED.append((path.name, txn.get("owner")))


@task(tags=TAGS)
def fails():
    raise ValueError("no metric")


@flow(task_runner=RUNNER)
def main():
    with transaction() as outer:
        outer.set("owner", "flow")
        # Cannot be sent, and nobody asks for it.
        outer.set("lock", (each for each in ()))
        path = write.submit("a.pt").result()
        assert os.path.exists(path)
        fails.submit().result()


if __name__ == "__main__":
    try:
        main()
    except ValueError:
        pass
    assert REMOVED == [("a.pt", "flow")], REMOVED
    assert not any(FOLDER.iterdir())

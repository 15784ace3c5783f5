# What a failed attempt has set is gone with it, and hooks run for the attempt that completes.
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
SEEN = []


@task(tags=TAGS, retries=1)
def attempt():
    txn = get_transaction()
    first = not (FOLDER / "tried").exists()
    (FOLDER / "tried").touch()
    if first:
        txn.set("of the first", 1)
        raise ValueError("the first fails")
    assert txn.get("of the first", None) is None
    with transaction() as inner:
        inner.set("inner", 1)
        assert inner.get("inner") == 1 and inner.get("of the first", 0) == 0
    txn.set("attempt", 2)
    txn.set("attempt", txn.get("attempt") + 1)


@attempt.on_commit
def note(txn):
    SEEN.append((txn.get("attempt"), txn.get("of the first", None), txn.get("inner", None)))


@task(tags=TAGS)
async def nested():
    # A task that is called in the body commits with it.
    written = step(1)
    assert not (FOLDER / "committed").exists()
    get_transaction().stage(written, on_commit_hooks=[staged])


@task
def step(x):
    return x + 1


@step.on_commit
def committed(txn):
    (FOLDER / "committed").touch()


def staged(txn):
    (FOLDER / "staged").write_text(f"{os.getpid()} {(FOLDER / 'committed').exists()}")


@flow(task_runner=RUNNER)
def main():
    attempt.submit().result()
    assert SEEN == [(3, None, None)], SEEN
    nested.submit().result()
    assert (FOLDER / "staged").read_text() == f"{os.getpid()} True"


if __name__ == "__main__":
    main()

# source: https://github.com/PrefectHQ/prefect/issues/17864
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


from prefect.transactions import get_transaction

SEEN = []


@task(tags=TAGS)
def job():
    get_transaction().set("id", "12345")
    return 1


@job.on_commit
def done(txn):
    SEEN.append(txn.get("id"))


if __name__ == "__main__":
    check((job, (), 1))
    assert SEEN == ["12345"], SEEN

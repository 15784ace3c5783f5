# source: https://github.com/cloudpipe/cloudpickle/issues/424
import dataclasses
import os
from dataclasses import dataclass, field

from pydantic import TypeAdapter
from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner
from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")


@dataclass
class Args:
    path: str
    lr: float = 0.1
    names: list = field(default_factory=list)


@task(tags=TAGS)
def required():
    # What HfArgumentParser, dacite, hydra and others ask of a dataclass.
    return [
        f.name
        for f in dataclasses.fields(Args)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]


@task(tags=TAGS)
def adapter():
    return TypeAdapter(Args).validate_python({"path": "x"}).lr


@task(tags=TAGS)
def derive():
    @dataclass
    class More(Args):
        extra: int = 1

    return More("p").names


@flow(task_runner=RUNNER)
def main():
    bad = {}
    for t, want in ((required, ["path"]), (adapter, 0.1), (derive, [])):
        try:
            got = t.submit().result()
            if got != want:
                bad[t.name] = got
        except Exception as e:
            bad[t.name] = f"{type(e).__name__}: {str(e)[:200]}"
    assert not bad, bad


if __name__ == "__main__":
    main()

# source: https://github.com/aiidateam/aiida-workgraph/pull/788
from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Annotated, Optional, get_type_hints

from pydantic import BaseModel, TypeAdapter
from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner
from prefect_gpu import GPUTaskRunner, gpu

RUNNER = {"thread": ThreadPoolTaskRunner, "pool": ProcessPoolTaskRunner}.get(
    os.environ.get("RUNNER"), GPUTaskRunner
)()
TAGS = gpu(memory="128MiB")


@dataclass
class Opt:
    lr: float = 0.1


@dataclass
class Conf:
    opt: Opt
    name: Optional[str] = None


def helper(c: Conf, n: Annotated[int, "x"] = 1) -> Optional[Opt]:
    return c.opt


@task(tags=TAGS)
def hints_of_class():
    return sorted(get_type_hints(Conf))


@task(tags=TAGS)
def hints_of_function():
    return sorted(get_type_hints(helper, include_extras=True))


@task(tags=TAGS)
def adapter():
    return TypeAdapter(Conf).validate_python({"opt": {"lr": 3}}).opt.lr


class Item(BaseModel):
    a: int


@flow(task_runner=ThreadPoolTaskRunner())
def sub(item: Item, extra: Optional[Opt] = None) -> int:
    assert isinstance(item, Item), item
    return item.a


@task(tags=TAGS)
def call_subflow():
    return sub({"a": 3})


@flow(task_runner=RUNNER)
def main():
    bad = {}
    for t, want in (
        (hints_of_class, ["name", "opt"]),
        (hints_of_function, ["c", "n", "return"]),
        (adapter, 3.0),
        (call_subflow, 3),
    ):
        try:
            got = t.submit().result()
            if got != want:
                bad[t.name] = got
        except Exception as e:
            bad[t.name] = f"{type(e).__name__}: {str(e)[:200]}"
    assert not bad, bad


if __name__ == "__main__":
    main()

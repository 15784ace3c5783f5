"""A module of a project, on sys.path: its tasks use its own global variables."""

import dataclasses
import threading
from prefect import task
from prefect_gpu import gpu

TAGS = gpu(memory="128MiB")

_model = None
_lock = threading.Lock()
_UNSET = object()
calls = []


def load():
    global _model
    if _model is None:
        _model = "weights"


def note(x, default=_UNSET):
    calls.append(x)
    return default is _UNSET


@dataclasses.dataclass
class Args:
    path: str
    lr: float = 0.1


@task(tags=TAGS)
def infer():
    load()
    return _model


@task(tags=TAGS)
def guarded():
    with _lock:
        return 1


@task(tags=TAGS)
def remembers():
    calls.clear()
    note(1)
    return list(calls)


@task(tags=TAGS)
def required():
    return [f.name for f in dataclasses.fields(Args) if f.default is dataclasses.MISSING]


from dataclasses import MISSING


@task(tags=TAGS)
def required_by_name():
    return [f.name for f in dataclasses.fields(Args) if f.default is MISSING]


@task(tags=TAGS)
def sentinel(x=_UNSET):
    return note(1, x)

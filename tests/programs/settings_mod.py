"""A module with settings that its functions assign, and a class that others subclass."""

import dataclasses
import logging

log = logging.getLogger(__name__)
_backend = None
_DEFAULT = object()


@dataclasses.dataclass
class Settings:
    path: str
    depth: int = 3


def use(name):
    global _backend
    _backend = name


def backend(default=_DEFAULT):
    if _backend is None:
        return "no default" if default is _DEFAULT else default
    return _backend


class Base:
    kinds: list = []

    def __init_subclass__(cls):
        Base.kinds.append(cls.__name__)

# Stands for tools that look into `__main__`: dill, fire, absl, config loaders, `multiprocessing` itself.
import importlib
import inspect
import pickle
import sys

from checks import TAGS, check
from prefect import task

CONSTANT = 17
TABLE = {"a": 1}


def helper():
    return CONSTANT + 1


class Plugin:
    name = "plugin"


def find(path):
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@task(tags=TAGS)
def constants():
    import __main__

    return __main__.CONSTANT, sys.modules["__main__"].TABLE, __main__.helper()


@task(tags=TAGS)
def by_name():
    return (
        find("__main__:Plugin")().name,
        find("__main__:CONSTANT"),
        hasattr(sys.modules["__main__"], "nothing"),
    )


@task(tags=TAGS)
def of_a_class():
    module = inspect.getmodule(Plugin)
    return module is sys.modules["__main__"], module.__name__, pickle.loads(pickle.dumps(helper))()


@task(tags=TAGS)
def assigned():
    import __main__

    __main__.CONSTANT = 20
    try:
        return CONSTANT, helper()
    finally:
        __main__.CONSTANT = 17


if __name__ == "__main__":
    check(
        (constants, (), (17, {"a": 1}, 18)),
        (by_name, (), ("plugin", 17, False)),
        (of_a_class, (), (True, "__main__", 18)),
        (assigned, (), (20, 21)),
    )

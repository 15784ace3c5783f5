# Stands for classes and functions that a script adds to an importable module: `create_model`, `namedtuple`, plug-ins.
import collections
import types

import settings_mod
from checks import TAGS, check
from prefect import task

settings_mod.Added = collections.namedtuple("Added", "a b", module="settings_mod")
exec(
    "class Late:\n    x = 3\n    def twice(self):\n        return 2 * self.x\n", vars(settings_mod)
)
exec("def late(x):\n    return x + Late.x\n", vars(settings_mod))
Added, Late, late = settings_mod.Added, settings_mod.Late, settings_mod.late


def method(self):
    return f"patched {self.depth}"


@task(tags=TAGS)
def given(added, later):
    return added._replace(b=3), later.twice(), type(added).__module__


@task(tags=TAGS)
def named():
    return Late().twice(), late(1), isinstance(Late(), settings_mod.Late)


@task(tags=TAGS)
def passed(bound):
    return bound()


if __name__ == "__main__":
    check(
        (given, (Added(1, 2), Late()), (Added(1, 3), 6, "settings_mod")),
        (named, (), (6, 4, True)),
        (passed, (types.MethodType(method, settings_mod.Settings("p")),), "patched 3"),
    )

# source: https://github.com/cloudpipe/cloudpickle/issues/462
# Weak dictionaries, sets and references, as caches of a script use them.
import weakref

from checks import TAGS, check
from prefect import task


class Model:
    def __init__(self, name):
        self.name = name
        self.children = weakref.WeakSet()
        self.parent = None

    def add(self, child):
        child.parent = weakref.ref(self)
        self.children.add(child)


KEPT = Model("kept")
by_name = weakref.WeakValueDictionary(kept=KEPT)
notes = weakref.WeakKeyDictionary({KEPT: "note"})


def load(name):
    model = by_name.get(name)
    if model is None:
        model = by_name[name] = Model(name)
    return model


class Cache:
    entries: weakref.WeakValueDictionary = weakref.WeakValueDictionary()

    def get(self, name):
        return self.entries.setdefault(name, Model(name))


@task(tags=TAGS)
def cached():
    first = load("a")
    return load("a") is first, load("kept").name, Cache().get("b").name


@task(tags=TAGS)
def noted(kept):
    notes[kept] = "new"
    return notes[kept]


@task(tags=TAGS)
def tree():
    parent, child = Model("p"), Model("c")
    parent.add(child)
    return child.parent() is parent, len(parent.children)


@task(tags=TAGS)
def given(parent, child):
    return child.parent() is parent, [each.name for each in parent.children]


if __name__ == "__main__":
    one, two = Model("one"), Model("two")
    one.add(two)
    check(
        (cached, (), (True, "kept", "b")),
        (noted, (KEPT,), "new"),
        (tree, (), (True, 1)),
        (given, (one, two), (True, ["two"])),
    )

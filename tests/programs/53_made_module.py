# Stands for modules made at run time and put into `sys.modules`, as six, Django's apps and generated stubs are.
import sys
import types

from checks import TAGS, check
from prefect import task

SOURCE = """
import threading

FACTOR = 3
lock = threading.Lock()
seen = []

class Thing:
    made = 0

    def __init__(self, x):
        Thing.made += 1
        self.x = x

    def times(self):
        with lock:
            seen.append(self.x)
        return triple(self.x)

def triple(x):
    return FACTOR * x

def look():
    return list(seen)
"""
made = types.ModuleType("made_at_run_time")
sys.modules["made_at_run_time"] = made
exec(SOURCE, made.__dict__)
package = types.ModuleType("made_package")
package.__path__ = []
part = types.ModuleType("made_package.part")
package.part = part
part.VALUE = 9
sys.modules.update({"made_package": package, "made_package.part": part})

import made_at_run_time as again
import made_package.part
from made_at_run_time import Thing, triple


@task(tags=TAGS)
def used(thing):
    made.seen.clear()
    return thing.times(), triple(2), again.look(), again is made, isinstance(thing, made.Thing)


@task(tags=TAGS)
def imported():
    import made_at_run_time

    return made_at_run_time.FACTOR, made_package.part.VALUE, made_at_run_time.Thing is Thing


@task(tags=TAGS)
def told(thing):
    return thing.x, type(thing).__module__


if __name__ == "__main__":
    check(
        (used, (Thing(2),), (6, 6, [2], True, True)),
        (imported, (), (3, 9, True)),
        (told, (Thing(5),), (5, "made_at_run_time")),
    )

# Stands for tasks made by a function of a module, which has no task under that name: it travels by value and uses the module.
import factory_mod
from checks import check

if __name__ == "__main__":
    check(
        (factory_mod.make("double", 2), (4,), (8, 1)),
        (factory_mod.make("triple", 3), (4,), (12, 1)),
        (factory_mod.TASKS["square"], (4,), (16, 1)),
    )

# Stands for names that a script adds to an importable module and that a task reads from the module, not from the script.
import settings_mod
from checks import TAGS, check
from prefect import task

exec("class Late:\n    x = 3\n", vars(settings_mod))
exec("def late(x):\n    return x + Late.x\n", vars(settings_mod))


@task(tags=TAGS)
def read():
    return settings_mod.Late.x, settings_mod.late(2)


@task(tags=TAGS)
def imported():
    from settings_mod import Late

    return Late is settings_mod.Late


if __name__ == "__main__":
    check((read, (), (3, 5)), (imported, (), True))

# Stands for a script whose tasks call an imported module that keeps its choice in a global, as matplotlib and Keras do.
import settings_mod
from checks import TAGS, check
from prefect import task
from settings_mod import Settings, backend, use


class Mine(settings_mod.Base):
    pass


@task(tags=TAGS)
def choose():
    before = backend()
    use("agg")
    try:
        return (
            before,
            settings_mod.backend(),
            settings_mod._backend,
            settings_mod.backend is backend,
        )
    finally:
        settings_mod._backend = None


@task(tags=TAGS)
def subclassed():
    return settings_mod.Base.kinds.count("Mine"), issubclass(Mine, settings_mod.Base)


@task(tags=TAGS)
def replaced(settings):
    import dataclasses

    return dataclasses.replace(settings, depth=4), type(settings) is Settings


if __name__ == "__main__":
    check(
        (choose, (), ("no default", "agg", "agg", True)),
        (subclassed, (), (1, True)),
        (replaced, (Settings("p"),), (Settings("p", 4), True)),
    )

# Stands for `singledispatch` functions and methods of a script, which hold weak references that pickle refuses.
import functools

from checks import TAGS, check
from prefect import task


class Mine:
    pass


@functools.singledispatch
def name(x):
    return "object"


@name.register
def _(x: int):
    return f"int {x}"


@name.register(list)
@name.register(Mine)
def of_many(x):
    return "many"


class Writer:
    prefix = "w"

    @functools.singledispatchmethod
    def write(self, x):
        return f"{self.prefix} object"

    @write.register
    def _(self, x: int):
        return f"{self.prefix} int"

    @functools.singledispatchmethod
    @classmethod
    def build(cls, x):
        return cls

    @build.register
    @classmethod
    def _(cls, x: str):
        return x


@task(tags=TAGS)
def dispatched(x):
    return name(x), name(True), name(Mine()), name(1.0), name.dispatch(list) is of_many


@task(tags=TAGS)
def methods(writer):
    return writer.write(1), writer.write("s"), Writer.build("x"), Writer.build(1) is Writer


@task(tags=TAGS)
def extended():
    name.register(float, lambda x: "float")
    return name(1.0)


if __name__ == "__main__":
    check(
        (dispatched, ([],), ("many", "int True", "many", "object", True)),
        (methods, (Writer(),), ("w int", "w object", "x", True)),
        (extended, (), "float"),
    )

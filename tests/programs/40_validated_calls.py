# source: https://github.com/pydantic/pydantic/issues/7846
# Functions and methods of a script under pydantic's `validate_call`, a `TypeAdapter` in a global, and constrained types.
from typing import Annotated

from checks import TAGS, check
from prefect import task
from pydantic import Field, PositiveInt, TypeAdapter, ValidationError, validate_call

OFFSET = 10
Rate = Annotated[float, Field(gt=0, lt=1)]
rates = TypeAdapter(list[Rate])


@validate_call
def shifted(x: PositiveInt, rate: Rate = 0.5) -> float:
    return x + rate + OFFSET


class Model:
    @validate_call(config={"arbitrary_types_allowed": True})
    def fit(self, steps: PositiveInt):
        return steps, type(self).__name__


@task(tags=TAGS)
def functions():
    try:
        shifted(-1)
    except ValidationError as error:
        return error.error_count(), shifted("2"), shifted.raw_function(1)


@task(tags=TAGS)
def methods(model):
    return model.fit("3"), Model().fit(4)


@task(tags=TAGS)
def adapted():
    return rates.validate_python(["0.25"]), rates.dump_json([0.5])


if __name__ == "__main__":
    check(
        (functions, (), (1, 12.5, 11.5)),
        (methods, (Model(),), ((3, "Model"), (4, "Model"))),
        (adapted, (), ([0.25], b"[0.5]")),
    )

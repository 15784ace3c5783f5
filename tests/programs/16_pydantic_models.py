# source: https://github.com/cloudpipe/cloudpickle/issues/565
# Models of a script: required fields, defaults, validators, private attributes, generic models, and models made in the task.
from typing import Generic, TypeVar

from checks import TAGS, check
from prefect import task
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator
from pydantic_core import PydanticUndefined

T = TypeVar("T")


class Layer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int
    name: str = Field("l", min_length=1, description="of the layer")
    tags: list[str] = Field(default_factory=list)
    _seen: int = PrivateAttr(0)

    @field_validator("size")
    @classmethod
    def positive(cls, size):
        if size < 1:
            raise ValueError("too small")
        return size


class Net(BaseModel):
    layers: list[Layer]
    parent: "Net | None" = None


class Answer(BaseModel, Generic[T]):
    item: T


@task(tags=TAGS)
def fields_of():
    fields = Layer.model_fields
    return (
        [name for name, each in fields.items() if each.is_required()],
        fields["size"].default is PydanticUndefined,
        Layer.model_json_schema()["required"],
        Layer(size=1)._seen,
    )


@task(tags=TAGS)
def derived(net):
    class Longer(Layer):
        extra: int = 1

    try:
        Longer(size=0)
    except ValueError as error:
        return (
            Longer(size=2).extra,
            isinstance(net, Net),
            net.layers[0].size,
            "too small" in str(error),
        )


@task(tags=TAGS)
def generic():
    return Answer[int].model_validate({"item": "3"}).item, Answer[Layer](item=Layer(size=4))


if __name__ == "__main__":
    check(
        (fields_of, (), (["size"], True, ["size"], 0)),
        (derived, (Net(layers=[Layer(size=7)], parent=Net(layers=[])),), (1, True, 7, True)),
        (generic, (), (3, Answer[Layer](item=Layer(size=4)))),
    )

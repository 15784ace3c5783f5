# Stands for recursive data classes and annotations as text, as dacite, cattrs and Prefect's own flows resolve them.
import typing
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from checks import TAGS, check
from prefect import flow, task
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import TypeAdapter


@dataclass
class Node:
    value: int
    left: Optional["Node"] = None
    edges: "list[Edge]" = field(default_factory=list)


@dataclass
class Edge:
    to: "Node"
    weight: "float" = 1.0


class Step(NamedTuple):
    node: "Node"
    then: Optional["Step"] = None


class Visitor:
    def visit(self, node: "Node") -> "Visitor":
        return self


@task(tags=TAGS)
def hints():
    return (
        typing.get_type_hints(Node)["left"] == Optional[Node],
        typing.get_type_hints(Edge)["to"] is Node,
        typing.get_type_hints(Step)["node"] is Node,
        typing.get_type_hints(Visitor.visit)["return"] is Visitor,
    )


@task(tags=TAGS)
def adapted():
    node = TypeAdapter(Node).validate_python(
        {"value": 1, "left": {"value": 2}, "edges": [{"to": {"value": 3}}]}
    )
    return node.left.value, node.edges[0].to.value, isinstance(node.edges[0], Edge)


@task(tags=TAGS)
def nested():
    @flow(task_runner=ThreadPoolTaskRunner())
    def walk(node: "Node", edges: "list[Edge] | None" = None) -> int:
        return node.value

    return walk(Node(4))


if __name__ == "__main__":
    check(
        (hints, (), (True, True, True, True)),
        (adapted, (), (2, 3, True)),
        (nested, (), 4),
    )

"""Tests drive a broker and its machine by public names: no module overrides or replaces a private one."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefect_gpu.broker.broker import Broker
from prefect_gpu.broker.machine import Machine

TESTS = Path(__file__).parents[1]

#: Methods and attributes.
PRIVATE = {
    name
    for each in (Broker, Machine)
    for name in re.findall(r"(?:self\.|def )(_[a-z]\w*)", inspect.getsource(each))
}

#: What a module with an offence contains. To read the syntax of all modules takes seconds.
NAMED = re.compile(rf"\b(Broker|Machine|{'|'.join(PRIVATE)})\b")

#: Functions that replace an attribute.
PATCHES = re.compile(r"(setattr|patch|patch\.object)$")


def offences(source: str) -> Iterator[str]:
    """Yield each subclass of `Broker` or `Machine` in a module, and each private name of them that is set."""
    tree = ast.parse(source)
    own = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prefect_gpu")
        for alias in node.names
        if alias.name in ("Broker", "Machine")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases}
            modules = {"broker.Broker", "machine.Machine"}
            if bases & own or any(base.endswith(tuple(modules)) for base in bases):
                yield f"class {node.name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            # Other classes have attributes of the same names, of their own.
            if node.attr in PRIVATE and ast.unparse(node.value) != "self":
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and node.args and PATCHES.search(ast.unparse(node.func)):
            texts = [ast.literal_eval(a) for a in node.args if isinstance(a, ast.Constant)]
            is_other = re.search(r"(^|\.)(?!Broker$|Machine$)[A-Z]\w*$", ast.unparse(node.args[0]))
            if not is_other and any(str(text).rpartition(".")[2] in PRIVATE for text in texts):
                yield ast.unparse(node)


@pytest.mark.parametrize(
    "source",
    [
        "from prefect_gpu.broker.broker import Broker as B\nclass Watched(B): ...",
        "from prefect_gpu.broker import machine\nclass Watched(machine.Machine): ...",
        "rig.broker._inbox = []",
        "monkeypatch.setattr(broker, '_put', print)",
        "monkeypatch.setattr(Machine, '_plan', print)",
        "mock.patch('prefect_gpu.broker.broker.Broker._put')",
    ],
)
def test_an_offence_is_found(source: str) -> None:
    assert NAMED.search(source) and len(list(offences(source))) == 1


def test_no_test_overrides_or_replaces_a_private_name_of_a_broker_or_its_machine() -> None:
    found = {
        str(path.relative_to(TESTS)): names
        for path in TESTS.rglob("*.py")
        if NAMED.search(source := path.read_text(encoding="utf-8"))
        if (names := [*offences(source)])
    }
    assert found == {}

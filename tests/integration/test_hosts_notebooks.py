"""GPU tasks work from IPython and from a Jupyter kernel, and what they print shows in the cell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.programs import ARRIVED, SCRIPT, TASKS, Workplace, workplace

pytest.importorskip("IPython")
pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

#: Runs cells in a kernel of its own, as a notebook's server does; prints what each cell printed.
DRIVER = """
import json, sys
from jupyter_client.manager import start_new_kernel

cells = json.load(open(sys.argv[1]))
manager, client = start_new_kernel(kernel_name="python3")
outputs = []
try:
    for cell in cells:
        printed = []
        def hear(message):
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed.append([content["name"], content["text"]])
            elif kind == "error":
                printed.append(["error", "\\n".join(content["traceback"])])
        reply = client.execute_interactive(cell, output_hook=hear, timeout=450)
        outputs.append([reply["content"]["status"], printed])
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=False)
json.dump(outputs, open(sys.argv[2], "w"))
"""


@pytest.fixture
def place(tmp_path: Path, prefect_server: str) -> Iterator[Workplace]:
    with workplace(tmp_path, prefect_server) as made:
        yield made


def run_cells(place: Workplace, cells: list[str]) -> list[str]:
    """Run cells in one kernel; give what each printed to standard output."""
    place.write("driver.py", DRIVER)
    place.write("cells.json", json.dumps(cells))
    place.run("driver.py", "cells.json", "outputs.json")
    outputs = json.loads((place.folder / "outputs.json").read_text(encoding="utf-8"))
    for status, printed in outputs:
        assert status == "ok", "".join(text for _, text in printed)
    return ["".join(text for name, text in printed if name == "stdout") for _, printed in outputs]


def test_a_jupyter_kernel(place: Workplace) -> None:
    _, first, again = run_cells(
        place,
        [
            TASKS,
            'print("RESULT", host_flow())',
            'print("RESULT", await async_host_flow())',
        ],
    )
    for printed in (first, again):
        assert ARRIVED in printed
        assert printed.count("child prints") == 2
    assert len(place.runs()) == 1


def test_a_task_that_is_defined_again_in_a_later_cell(place: Workplace) -> None:
    cell = """
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu

class Answer:
    def __init__(self, value):
        self.value = value

@task(tags=gpu(memory="64MiB", framework="none"))
def answer():
    return Answer(VALUE)

@flow(task_runner=GPUTaskRunner(devices="host"))
def ask():
    got = answer.submit().result()
    assert isinstance(got, Answer)
    return got.value

print("ANSWER", ask())
"""
    printed = run_cells(place, ["VALUE = 1\n" + cell, "VALUE = 2\n" + cell])
    assert ["ANSWER 1" in printed[0], "ANSWER 2" in printed[1]] == [True, True]


@pytest.mark.slow
def test_a_python_script_run_by_ipython(place: Workplace) -> None:
    place.write("script.py", SCRIPT)
    done = place.run("-m", "IPython", "--no-banner", "script.py")
    assert ARRIVED in done.stdout
    assert len(place.runs()) == 1


def test_an_ipython_script(place: Workplace) -> None:
    # A magic makes it no Python file: a child that ran it again would fail.
    place.write("script.ipy", "%time 1 + 1\n" + SCRIPT)
    done = place.run("-m", "IPython", "--no-banner", "script.ipy")
    assert ARRIVED in done.stdout
    assert done.stdout.count("child prints") == 2
    assert len(place.runs()) == 1


@pytest.mark.slow
def test_a_command_of_ipython(place: Workplace) -> None:
    done = place.run("-m", "IPython", "--no-banner", "-c", SCRIPT)
    assert ARRIVED in done.stdout
    assert len(place.runs()) == 1

"""GPU tasks work from IPython and from a Jupyter kernel, and what they print shows in the cell."""

from __future__ import annotations

import pytest

from tests.cases import needs
from tests.integration.programs import ARRIVED, SCRIPT, TASKS, Workplace, run_cells

pytestmark = needs("IPython", "jupyter_client", "ipykernel")


#: Defines its class and task again each time that it runs.
AGAIN = """
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


def test_a_jupyter_kernel_also_with_a_task_that_is_defined_again_in_a_later_cell(
    place: Workplace,
) -> None:
    # In one kernel, which takes seconds to start.
    calls = ['print("RESULT", host_flow())', 'print("RESULT", await async_host_flow())']
    _, first, again, *answers = run_cells(
        place, [TASKS, *calls, "VALUE = 1\n" + AGAIN, "VALUE = 2\n" + AGAIN]
    )
    for printed in (first, again):
        assert ARRIVED in printed
        assert printed.count("child prints") == 2
    assert len(place.runs()) == 1
    assert ["ANSWER 1" in answers[0], "ANSWER 2" in answers[1]] == [True, True]


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

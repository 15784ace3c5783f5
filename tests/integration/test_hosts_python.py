"""GPU tasks work from wherever a flow may be written: scripts, standard input, modules, entrypoints.

One program of each kind runs every day; those that differ from it in one detail are marked `slow`.
"""

from __future__ import annotations

import os

import pytest

from tests.integration.programs import ARRIVED, CALL, SCRIPT, TASKS, Workplace

LOAD = """
from prefect.flows import load_flow_from_entrypoint
import sys
if len(sys.argv) > 2:
    __import__(sys.argv[2])
print("RESULT", load_flow_from_entrypoint(sys.argv[1])())
"""


def check(place: Workplace, output: str, module: str = "__main__") -> None:
    assert ARRIVED in output
    assert output.count("child prints") == 2
    # The module level ran in the parent, and in no child.
    assert [name for _, name in place.runs()] == [module]


def test_a_script_without_a_main_guard(place: Workplace) -> None:
    place.write("script.py", SCRIPT)
    check(place, place.run("script.py").stdout)


@pytest.mark.slow
def test_a_script_run_from_another_folder(place: Workplace) -> None:
    path = place.write("deep/script.py", SCRIPT)
    place.write("deep/neighbour.py", "VALUE = 1\n")
    path.write_text("import neighbour\n" + SCRIPT, encoding="utf-8")
    check(place, place.run(os.path.join("deep", "script.py")).stdout)


@pytest.mark.slow
def test_an_async_flow_in_a_script(place: Workplace) -> None:
    place.write(
        "script.py", TASKS + '\nimport asyncio\nprint("RESULT", asyncio.run(async_host_flow()))\n'
    )
    check(place, place.run("script.py").stdout)


def test_a_program_on_standard_input(place: Workplace) -> None:
    check(place, place.run("-", stdin=SCRIPT).stdout)


@pytest.mark.slow
def test_a_program_given_as_a_string(place: Workplace) -> None:
    check(place, place.run("-c", SCRIPT).stdout)


def test_a_module_run_with_dash_m(place: Workplace) -> None:
    place.write("pkg/__init__.py", "")
    place.write("pkg/sub/__init__.py", "")
    # A relative import at module level, which a second run of the file by path could not do.
    place.write("pkg/sub/near.py", "VALUE = 1\n")
    place.write("pkg/sub/mod.py", "from .near import VALUE\n" + SCRIPT)
    check(place, place.run("-m", "pkg.sub.mod").stdout)


@pytest.mark.slow
def test_a_package_run_with_dash_m(place: Workplace) -> None:
    place.write("pkg/__init__.py", "")
    place.write("pkg/__main__.py", SCRIPT)
    check(place, place.run("-m", "pkg").stdout)


def test_interpreter_flags_and_arguments_reach_the_child(place: Workplace) -> None:
    place.write(
        "script.py",
        """
import os
import sys
from prefect import flow, task
from prefect_gpu import GPUTaskRunner, gpu

@task(tags=gpu(memory="64MiB", framework="none"))
def look():
    return sys.argv, sys.flags.optimize, sys.flags.utf8_mode, os.getcwd(), sys.path

@flow(task_runner=GPUTaskRunner(devices="host"))
def host_flow():
    # Changed at run time: what the child gets is what holds now.
    sys.path.insert(0, os.path.join(os.getcwd(), "added"))
    os.chdir("elsewhere")
    here = sys.argv, sys.flags.optimize, sys.flags.utf8_mode, os.getcwd(), sys.path
    there = look.submit().result()
    if tuple(map(str, here)) != tuple(map(str, there)):
        raise RuntimeError(f"{here} is not {there}")
    return "all arrived"

print("RESULT", host_flow())
""",
    )
    (place.folder / "elsewhere").mkdir()
    done = place.run("-O", "-X", "utf8", "script.py", "--epochs", "3")
    assert ARRIVED in done.stdout


def test_a_module_on_a_path_added_at_run_time(place: Workplace) -> None:
    place.write("late/tasks_of_late.py", TASKS)
    place.write(
        "script.py",
        'import sys\nsys.path.append("late")\nimport tasks_of_late\n'
        'print("RESULT", tasks_of_late.host_flow())\n',
    )
    done = place.run("script.py")
    assert ARRIVED in done.stdout
    # An importable module is imported by each of the two children, under its own name.
    assert [name for _, name in place.runs()] == ["tasks_of_late"] * 3


@pytest.mark.slow
def test_an_installed_module(place: Workplace) -> None:
    site = place.folder / "site"
    place.write("elsewhere/installed_tasks.py", TASKS)
    place.write("site/installed.pth", f"{place.folder / 'elsewhere'}\n")
    place.write(
        "script.py",
        f"import site\nsite.addsitedir({str(site)!r})\nimport installed_tasks\n"
        'print("RESULT", installed_tasks.host_flow())\n',
    )
    done = place.run("script.py")
    assert ARRIVED in done.stdout
    assert {name for _, name in place.runs()} == {"installed_tasks"}


def test_a_deployment_entrypoint(place: Workplace) -> None:
    place.write("flows/deployed_flow.py", TASKS)
    place.write("load.py", LOAD)
    done = place.run("load.py", "flows/deployed_flow.py:host_flow")
    assert ARRIVED in done.stdout


@pytest.mark.slow
def test_a_deployment_entrypoint_named_as_an_imported_module(place: Workplace) -> None:
    # Prefect then calls the module `__prefect_loader_<digest>__`, which nobody can import.
    place.write("flows/json.py", TASKS)
    place.write("load.py", LOAD)
    done = place.run("load.py", "flows/json.py:host_flow", "json")
    (run,) = place.runs()
    assert run[1].startswith("__prefect_loader_")
    check(place, done.stdout, run[1])


@pytest.mark.slow
def test_a_module_loaded_by_path_that_no_path_leads_to(place: Workplace) -> None:
    place.write("hidden/by_path.py", TASKS)
    place.write(
        "script.py",
        """
import importlib.util
import sys
spec = importlib.util.spec_from_file_location("by_path", "hidden/by_path.py")
module = importlib.util.module_from_spec(spec)
sys.modules["by_path"] = module
spec.loader.exec_module(module)
print("RESULT", module.host_flow())
""",
    )
    check(place, place.run("script.py").stdout, "by_path")


@pytest.mark.parametrize("mode", ["importlib", pytest.param("prepend", marks=pytest.mark.slow)])
def test_a_test_under_pytest(place: Workplace, mode: str) -> None:
    place.write(
        "suite/test_flow.py", TASKS + "\ndef test_it():\n    assert host_flow() == 'all arrived'\n"
    )
    done = place.run(
        "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--rootdir=suite",
        f"--import-mode={mode}", "suite",
        environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert "1 passed" in done.stdout
    assert done.stdout.count("child prints") == 2


@pytest.mark.slow
def test_code_run_by_exec(place: Workplace) -> None:
    # As notebooks converted by tools, debuggers and `runpy` do it.
    place.write("target.py", SCRIPT)
    place.write("script.py", 'import runpy\nrunpy.run_path("target.py", run_name="__main__")\n')
    check(place, place.run("script.py").stdout)


@pytest.mark.slow
def test_tasks_of_one_module_called_from_a_script(place: Workplace) -> None:
    place.write("tasks.py", TASKS)
    place.write("script.py", "import tasks\n" + CALL.replace("host_flow", "tasks.host_flow"))
    assert ARRIVED in place.run("script.py").stdout

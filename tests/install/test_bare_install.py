"""What a bare `pip install` of the wheel brings, without constraints: newest versions that are accepted, no framework.

The package is complete there, its commands and Prefect's own work, and a worker runs a deployment: on this Python,
and on the lowest and the highest one that were tried, where they are on the `PATH`. The same with the lowest Prefect
that is accepted.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.install.conftest import Note
from tests.install.environments import new_environment, pip, run, versions
from tests.integration.programs import REPOSITORY, Workplace
from tests.ui.server import running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

FLOWS = """
from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu


@task(tags=gpu(memory="64MiB", framework="none"))
def double(x):
    return 2 * x


@flow(task_runner=GPUTaskRunner(), persist_result=True)
def doubled(numbers):
    return double.map(numbers).result()


if __name__ == "__main__":
    print("RESULT", doubled([21]))
"""

DEPLOY = """
from pathlib import Path

from prefect import flow

here = str(Path(__file__).parent)
doubled = flow.from_source(source=here, entrypoint="flows.py:doubled")
doubled.deploy(name="nightly", work_pool_name="machines", print_next_steps=False)
"""

#: Prints the state and result of the deployment's flow run, and keys of artifacts of its task runs.
OUTCOME = """
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter

with get_client(sync_client=True) as client:
    (run,) = [each for each in client.read_flow_runs() if each.deployment_id]
    reports = client.read_artifacts(flow_run_filter=FlowRunFilter(id={"any_": [run.id]}))
    print(run.state.type.value, run.state.result())
    print(*sorted({each.key for each in reports if each.task_run_id}))
"""

#: Prints what the package imports and does not require.
NOT_REQUIRED = """
import ast, pathlib, re, sys
from importlib.metadata import distributions, requires
import prefect_gpu

# `packages_distributions` of Python 3.10 does not know all of them.
owners = {}
for each in distributions():
    for file in each.files or ():
        owners.setdefault(file.parts[0].removesuffix(".py"), set()).add(each.name)

imported = set()
for path in pathlib.Path(prefect_gpu.__file__).parent.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
required = {re.match(r"[\\w-]+", text)[0].lower() for text in requires("prefect-gpu")}
for name in sorted(imported - {"prefect_gpu", *sys.stdlib_module_names}):
    packages = {each.lower().replace("_", "-") for each in owners.get(name, {name})}
    if not packages & required:
        print(name)
"""


def answers(python: str) -> bool:
    """Return whether an interpreter is there; some names on a `PATH` start nothing."""
    try:
        return subprocess.run([python, "--version"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def lowest_prefect() -> str:
    """Return the lowest requirement of Prefect that `pyproject.toml` accepts."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^    "prefect>=([\d.]+),', text, re.MULTILINE)
    return f"prefect=={version}"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((sys.executable,), id="newest"),
        pytest.param(("python3.10",), id="python3.10"),
        pytest.param(("python3.13",), id="python3.13"),
        # A FastAPI of its time: the server of Prefect 3.6.20 answers with status 500 on those that
        # came with Starlette 1 ("'PrefectRouter' object has no attribute 'routes'"). Its worker imports
        # `importlib_metadata`, which it does not require.
        pytest.param(
            (sys.executable, lowest_prefect(), "fastapi<0.129", "importlib-metadata"),
            id="lowest-prefect",
        ),
    ],
)
def bare(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    wheel: Path,
    note: Note,
) -> Iterator[Workplace]:
    python, *requirements = request.param
    if not answers(python):
        pytest.skip(f"no {python} on the PATH")
    with new_environment(tmp_path_factory.mktemp("bare"), python) as place:
        began = time.monotonic()
        pip(place.python, "install", str(wheel), *requirements)
        seconds = time.monotonic() - began
        shown = versions(place, "prefect", "fastapi", "cloudpickle", "pydantic", "cyclopts")
        note(f"bare installation: {seconds:.0f} s, {Path(python).name}, {shown}")
        place.write("flows.py", FLOWS)
        home = place.folder / "home" / "prefect"
        home.mkdir()
        with running_server(home, place.python, environment=place.environment) as url:
            place.environment["PREFECT_API_URL"] = url
            yield place


# -- the package -------------------------------------------------------------------------------


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    package = REPOSITORY / "prefect_gpu"
    files = {
        str(path.relative_to(REPOSITORY))
        for path in package.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == files


def test_it_is_imported_from_the_environment_and_what_it_imports_is_required(
    bare: Workplace,
) -> None:
    program = "import prefect_gpu; print(prefect_gpu.__file__)"
    assert Path(run(bare, "python", "-c", program).stdout.strip()).is_relative_to(bare.folder)
    assert run(bare, "python", "-c", NOT_REQUIRED).stdout.split() == []
    run(bare, "python", "-m", "pip", "check")


def test_prefect_has_all_that_the_subclasses_of_its_classes_rest_on(bare: Workplace) -> None:
    names = (REPOSITORY / "tests" / "prefect_names.py").read_text(encoding="utf-8")
    assert run(bare, "python", str(bare.write("prefect_names.py", names))).stdout == ""


# -- commands ----------------------------------------------------------------------------------


def test_the_command_answers_under_both_of_its_names(bare: Workplace) -> None:
    version = run(bare, "prefect-gpu", "--version").stdout
    assert version.startswith("prefect-gpu ")
    assert run(bare, "python", "-m", "prefect_gpu", "--version").stdout == version
    assert "host memory" in run(bare, "prefect-gpu", "devices").stdout
    assert "no tasks waiting" in run(bare, "prefect-gpu", "status").stdout


def test_the_doctor_has_nothing_to_mend(bare: Workplace) -> None:
    said = run(bare, "prefect-gpu", "doctor").stdout
    assert versions(bare, "prefect", "fastapi") in said
    assert f"{bare.environment['PREFECT_API_URL']} answers" in said


# -- flows -------------------------------------------------------------------------------------


def test_a_flow_runs_and_prefect_lists_it_and_its_reports(bare: Workplace) -> None:
    assert "RESULT [42]" in run(bare, "python", "flows.py").stdout
    assert "doubled" in run(bare, "prefect", "flow-run", "ls").stdout
    assert "gpu-memory-double" in run(bare, "prefect", "artifact", "ls").stdout


def test_a_process_worker_runs_a_deployment(bare: Workplace) -> None:
    bare.write("deploy.py", DEPLOY)
    run(bare, "prefect", "work-pool", "create", "machines", "--type", "process")
    run(bare, "python", "deploy.py")
    run(bare, "prefect", "deployment", "run", "doubled/nightly", "--param", "numbers=[1, 2]")
    run(bare, "prefect", "worker", "start", "--pool", "machines", "--type", "process", "--run-once")
    state, reports = run(bare, "python", "-c", OUTCOME).stdout.splitlines()
    assert (state, reports) == ("COMPLETED [2, 4]", "gpu-memory-double")

"""What a bare `pip install .` resolves to, without constraints: Prefect's own commands work there.

Packages are downloaded, so only `make check` runs this.
"""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ui.server import running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

REPOSITORY = Path(__file__).resolve().parents[2]

#: Installing takes about a minute with a warm cache of downloads, a command about 5 s.
INSTALL_S = 900.0
COMMAND_S = 180.0

FLOWS = """
from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu


@task(tags=gpu(memory="64MiB", framework="none"))
def double(x):
    return 2 * x


@flow(task_runner=GPUTaskRunner(devices="host", standby=0))
def doubled():
    return double.submit(21).result()


if __name__ == "__main__":
    print("RESULT", doubled())
"""

DEPLOY = """
from pathlib import Path

from prefect import flow

here = str(Path(__file__).parent)
doubled = flow.from_source(source=here, entrypoint="flows.py:doubled")
print("DEPLOYED", doubled.deploy(name="nightly", work_pool_name="machines", print_next_steps=False))
"""


@dataclass(frozen=True)
class Installed:
    """An environment with this package, and a Prefect server that runs from it."""

    python: Path
    folder: Path
    environment: dict[str, str]

    def run(self, *arguments: str) -> str:
        """Return what this Python prints for arguments; fail unless it exits with 0."""
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def prefect(self, *arguments: str) -> str:
        """Return what a command of Prefect prints; fail unless it exits with 0."""
        return self.run("-m", "prefect", *arguments)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("install")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PREFECT_", "PYTEST_", "COV_", "COVERAGE_"))
        and key not in ("PYTHONPATH", "PIP_CONSTRAINT", "VIRTUAL_ENV")
    }
    environment.update(
        PREFECT_HOME=str(folder / "home"),
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        DO_NOT_TRACK="1",
        # Tables are as wide as the terminal, and cut what does not fit.
        COLUMNS="200",
    )
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", str(REPOSITORY)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
    )
    assert done.returncode == 0, done.stderr
    (folder / "flows.py").write_text(FLOWS, encoding="utf-8")
    (folder / "deploy.py").write_text(DEPLOY, encoding="utf-8")
    (folder / "server").mkdir()
    with running_server(folder / "server", str(python)) as url:
        environment["PREFECT_API_URL"] = url
        place = Installed(python, folder, environment)
        assert "RESULT 42" in place.run("flows.py")
        yield place


def test_the_package_is_imported_from_the_environment_and_not_from_the_repository(
    installed: Installed,
) -> None:
    path = installed.run("-c", "import prefect_gpu; print(prefect_gpu.__file__)")
    assert Path(path.strip()).is_relative_to(installed.folder)


def test_prefect_lists_flow_runs(installed: Installed) -> None:
    assert "doubled" in installed.prefect("flow-run", "ls")


def test_prefect_lists_the_artifacts_of_reports(installed: Installed) -> None:
    assert "gpu-memory-double" in installed.prefect("artifact", "ls")


def test_a_flow_with_the_runner_deploys(installed: Installed) -> None:
    installed.prefect("work-pool", "create", "machines", "--type", "process")
    assert "DEPLOYED" in installed.run("deploy.py")
    assert "doubled/nightly" in installed.prefect("deployment", "ls")


def test_the_command_line_of_the_package_answers(installed: Installed) -> None:
    script = installed.python.with_name("prefect-gpu")
    done = subprocess.run(
        [str(script), "devices"],
        env=installed.environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert done.returncode == 0, done.stderr

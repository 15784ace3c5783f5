"""The README's quick start as it is typed, and then the integration tests with the same newest versions.

`constraints.txt` has the versions that `make test` runs with. Here pip chooses, so Prefect, Ray, TensorFlow
and all below them are the newest that the requirements accept.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.ports import free_port
from tests.install.conftest import Note
from tests.install.environments import (
    INSTALL_S,
    new_environment,
    outer_environment,
    pip,
    run,
    versions,
)
from tests.integration.documents import Command, blocks, commands
from tests.integration.programs import REPOSITORY, Workplace
from tests.ui.server import running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

#: PyTorch 2.13 is the version of `constraints.txt`. Newer ones bring gigabytes of CUDA, which no test here uses.
TORCH = "torch==2.13.0"

NAMES = ("prefect", "fastapi", "torch", "tensorflow-cpu", "ray", "cloudpickle", "pytest")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    with new_environment(tmp_path_factory.mktemp("quick")) as made:
        made.write("constraint.txt", TORCH)
        shutil.copytree(REPOSITORY / "flows", made.folder / "flows")
        yield made


def install(place: Workplace, wheel: Path, extras: str) -> None:
    """Install the wheel with extras, `[examples]`, in place of the clone."""
    constraint = str(place.folder / "constraint.txt")
    pip(place.python, "install", "--constraint", constraint, f"{wheel}{extras}")


def quick_start() -> list[Command]:
    """Return the commands of both terminals."""
    console = [each for each in blocks(REPOSITORY / "README.md") if each.language == "console"]
    first = next(at for at, each in enumerate(console) if "prefect server start" in each.code)
    return [command for each in console[first : first + 2] for command in commands(each)]


def test_the_quick_start_as_it_is_typed(place: Workplace, wheel: Path, note: Note) -> None:
    port, printed = free_port(), {}
    with ExitStack() as stack:
        for words in (command.words for command in quick_start()):
            if words[0] == "pip":
                _, verb, requirement = words
                assert verb == "install" and requirement.startswith(".[")
                began = time.monotonic()
                install(place, wheel, requirement[1:])
                note(f"quick start: pip install {time.monotonic() - began:.0f} s")
            elif words == ("prefect", "server", "start"):
                # Port 4200 may be taken.
                home = Path(place.environment["PREFECT_HOME"])
                home.mkdir(exist_ok=True)
                stack.enter_context(
                    running_server(home, place.python, port, environment=place.environment)
                )
            else:
                began = time.monotonic()
                typed = [word.replace("4200", str(port)) for word in words]
                printed[words[0], words[1]] = run(place, *typed)
                note(f"quick start: {' '.join(words)} {time.monotonic() - began:.0f} s")
        flow = printed["python", "flows/evaluate_models.py"]
        ranked = re.findall(r"^\| \d \| ([a-z]+-[a-z]+) ", flow.stdout, re.MULTILINE)
        kinds = ("linear", "mlp", "cnn")
        assert sorted(ranked) == sorted(
            f"{of}-{kind}" for of in ("torch", "keras") for kind in kinds
        )
        # What the README says of it next.
        assert f"View at http://127.0.0.1:{port}/runs/flow-run/" in flow.stderr
        listed = run(place, "prefect", "artifact", "ls").stdout
        for key in (
            "gpu-flow-evaluate-models",
            "gpu-leaderboard-evaluate-models",
            "gpu-memory-evaluate",
        ):
            assert key in listed
        name = re.findall(r"Flow run '([\w-]+)'", flow.stderr)[0]
        assert "keras-cnn" in run(place, "prefect-gpu", "report", name).stdout
        assert "no tasks on devices" in run(place, "prefect-gpu", "status").stdout


def test_the_integration_tests_pass_with_the_newest_versions(
    place: Workplace, wheel: Path, note: Note
) -> None:
    install(place, wheel, "[examples,test]")
    note(f"newest versions: {versions(place, *NAMES)}")
    # The environment is that of `make test`, not of a user: short paths for Ray's sockets.
    environment = outer_environment() | {
        "PREFECT_HOME": str(place.folder / "newest" / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PYTHONPYCACHEPREFIX": str(place.folder / "newest" / "bytecode"),
    }
    options = [
        "-m",
        "not slow and not gpu",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [place.python, "-m", "pytest", "-q", *options, "tests/integration"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    note(f"newest versions: {done.stdout.splitlines()[-1]}")

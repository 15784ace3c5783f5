"""New virtual environments with the wheel of this checkout, and programs that run in them.

Packages come from where pip takes them on this machine. Nothing of the checkout is on the path of the
programs, and what they write lies in a folder of the test's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.programs import LIMIT_S, REPOSITORY, Workplace, workplace

#: Only breaks a deadlock: with a cache of downloads a bare installation takes half a minute, one with PyTorch,
#: TensorFlow and Ray four minutes.
INSTALL_S = 3000.0

#: Settings of pytest, coverage and this environment that are no user's.
_DROPPED = (
    *("PREFECT_", "PYTEST_", "COV_", "COVERAGE_"),
    *("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PIP_CONSTRAINT", "VIRTUAL_ENV"),
)


def outer_environment() -> dict[str, str]:
    """Return the environment of these tests without what is theirs alone."""
    return {k: v for k, v in os.environ.items() if not k.startswith(_DROPPED)}


def pip(python: str, *arguments: str) -> None:
    """Run pip as this machine has it configured; fail unless it exits with 0."""
    done = subprocess.run(
        [python, "-m", "pip", *arguments],
        env=outer_environment(),
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
    )
    assert done.returncode == 0, done.stderr


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout; return its path."""
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(folder), str(REPOSITORY))
    (wheel,) = folder.glob("*.whl")
    return wheel


@contextmanager
def new_environment(folder: Path, python: str = sys.executable) -> Iterator[Workplace]:
    """Yield a workplace with a virtual environment of its own, which has pip alone; remove that at the end.

    Args:
        folder: An empty one.
        python: The interpreter of which it is.

    Raises:
        AssertionError: A process is left that was started there.
    """
    subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
    scripts = folder / "venv" / "bin"
    try:
        with workplace(folder, None, str(scripts / "python")) as place:
            environment = outer_environment()
            own = {k: v for k, v in place.environment.items() if k.startswith("PREFECT_")}
            # Standbys as a user has them.
            del own["PREFECT_INTEGRATIONS_GPU_STANDBY"]
            environment.update(own, DO_NOT_TRACK="1")
            # As an activated environment has it.
            environment["PATH"] = os.pathsep.join([str(scripts), environment["PATH"]])
            # Tables are as wide as the terminal, and cut what does not fit.
            environment["COLUMNS"] = "200"
            for key, name in (("HOME", "home"), ("TMPDIR", "tmp")):
                (folder / name).mkdir(exist_ok=True)
                environment[key] = str(folder / name)
            place.environment = environment
            yield place
    finally:
        # Up to some gigabytes.
        shutil.rmtree(folder / "venv")


def run(place: Workplace, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as it is typed in an activated environment; fail unless it exits with 0."""
    done = subprocess.run(
        words,
        cwd=place.folder,
        env=place.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done


def versions(place: Workplace, *names: str) -> str:
    """Return names and versions of installed packages, with commas."""
    program = (
        "import sys; from importlib.metadata import version as v; print(*map(v, sys.argv[1:]))"
    )
    found = run(place, "python", "-c", program, *names).stdout.split()
    return ", ".join(f"{name} {version}" for name, version in zip(names, found, strict=True))

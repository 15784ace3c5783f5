"""The wheel of this checkout, and lines that are shown after the tests: versions and seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.install.environments import build_wheel

_NOTES = pytest.StashKey[list[str]]()

#: Shows a line after the tests.
Note = Callable[[str], None]


@pytest.fixture(scope="session")
def note(pytestconfig: pytest.Config) -> Note:
    return pytestconfig.stash.setdefault(_NOTES, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show the lines."""
    for line in config.stash.get(_NOTES, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))

"""Where settings are read from, as `docs/settings.md` says, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from tests.integration.programs import workplace

SHOW = """
from prefect_gpu.settings import read_settings

found = read_settings()
print(found.devices, found.placement, found.max_processes, found.max_tasks_per_device, found.headroom)
"""

NAME = "PREFECT_INTEGRATIONS_GPU_"


def test_each_source_is_read_and_the_stronger_one_counts(tmp_path: Path) -> None:
    with workplace(tmp_path, None) as place:
        place.environment.pop(NAME + "DEVICES", None)
        place.write("show.py", SHOW)
        place.write(
            "pyproject.toml",
            '[tool.prefect.integrations.gpu]\nheadroom = "1MiB"\nmax_tasks_per_device = 5\n',
        )
        assert place.run("show.py").stdout.split() == ["auto", "spread", "None", "5", "1048576"]
        place.write(
            "prefect.toml",
            '[integrations.gpu]\nmax_tasks_per_device = 4\nmax_processes = 4\nplacement = "pack"\ndevices = "nvml"\n',
        )
        place.write(".env", f"{NAME}MAX_PROCESSES=3\n{NAME}DEVICES=nvml\n")
        shown = place.run("show.py", environment={NAME + "DEVICES": "host"}).stdout
        assert shown.split()[:4] == ["host", "pack", "3", "4"]


def test_prefects_own_command_refuses_them(tmp_path: Path) -> None:
    with workplace(tmp_path, None) as place:
        done = place.run("-m", "prefect", "config", "set", f"{NAME}PLACEMENT=pack", expect=1)
        assert f"Unknown setting name '{NAME}PLACEMENT'" in done.stdout + done.stderr

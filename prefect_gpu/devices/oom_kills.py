"""Has the kernel killed a process for want of the machine's own memory?

It counts kills, of anybody's processes: whose they were no counter says. A figure is worth
something beside an earlier one only. What limits the machine's memory is `host`'s to read.
"""

from __future__ import annotations

import re
from pathlib import Path

from prefect_gpu.devices.host import parse_group_folders

#: In `/proc/vmstat`, in `memory.events` of a control group of version 2 and in
#: `memory.oom_control` of one of version 1 (Linux 4.13 and later) alike.
_COUNT = re.compile(r"^oom_kill ([0-9]+)$", re.MULTILINE)


class OomKills:
    """Reads the machine's counter and those of our control groups. Any thread may use it.

    A container may hide the machine's, and a group knows its own kills alone: so all are read.

    Args:
        proc: Where `/proc` is; it says where the control groups are.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        # A process is hardly ever moved to another group: looked up once.
        folders = parse_group_folders(
            _text(proc / "self" / "cgroup"), _text(proc / "self" / "mountinfo")
        )
        self._files = [proc / "vmstat"] + [
            folder.path / ("memory.events" if folder.version == 2 else "memory.oom_control")
            for folder in folders
        ]

    def read(self) -> int:
        """Add the counters up, 0 for each that is not there.

        One kill may count several times, so only this holds: the sum rises if there was one.
        """
        matches = [_COUNT.search(_text(file)) for file in self._files]
        return sum(int(match[1]) for match in matches if match is not None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""

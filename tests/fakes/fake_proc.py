"""A folder that looks like `/proc`, with control groups that the machine at hand does not have."""

from __future__ import annotations

from pathlib import Path


class FakeProc:
    """Writes the files that say which control groups this process is in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "self").mkdir(parents=True)

    def set_groups(self, cgroup: str, mountinfo: str) -> None:
        """Write which control groups this process is in, and where they are mounted."""
        (self.folder / "self" / "cgroup").write_text(cgroup)
        (self.folder / "self" / "mountinfo").write_text(mountinfo)

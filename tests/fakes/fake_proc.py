"""A folder that looks like `/proc`, for what the machine at hand does not have."""

from __future__ import annotations

from pathlib import Path


class FakeProc:
    """Writes processes and control groups under a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "self" / "ns").mkdir(parents=True)
        (folder / "self" / "stat").write_text("")
        self.set_namespace("pid:[4026531836]")

    def set_namespace(self, link: str) -> None:
        """Say which pid namespace this is."""
        path = self.folder / "self" / "ns" / "pid"
        path.unlink(missing_ok=True)
        path.symlink_to(link)

    def add(
        self,
        pid: int,
        parent: int = 1,
        session: int | None = None,
        pages: int = 1,
        files: tuple[str, ...] = (),
    ) -> None:
        """Add or change a process; `files` are its open files."""
        folder = self.folder / str(pid)
        (folder / "fd").mkdir(parents=True, exist_ok=True)
        fields = ["0"] * 44
        fields[0], fields[1], fields[3] = "S", str(parent), str(session or pid)
        fields[21] = str(pages)
        (folder / "stat").write_text(f"{pid} (py (x) y) {' '.join(fields)}\n")
        for number, target in enumerate(files):
            (folder / "fd" / str(number)).symlink_to(target)

    def remove(self, pid: int) -> None:
        """End a process."""
        (self.folder / str(pid) / "stat").unlink()

    def set_groups(self, cgroup: str, mountinfo: str) -> None:
        """Say which control groups this process is in."""
        (self.folder / "self" / "cgroup").write_text(cgroup)
        (self.folder / "self" / "mountinfo").write_text(mountinfo)

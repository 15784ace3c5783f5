"""Does to the processes of a chaos run what its plan says."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect_gpu.processes.launcher import SOURCE_TITLE, STANDBY_TITLE
from tests.chaos.plan import Fault, Target
from tests.faults.api_proxy import Answer, Proxy
from tests.integration.programs import Workplace, lines_of


@dataclass(frozen=True)
class Note:
    """One line of the notes of bodies."""

    word: str
    key: str
    attempt: int
    pid: int
    #: On the clock of `time.monotonic`, which all processes of a machine share.
    at_s: float


def read_notes(path: Path) -> list[Note]:
    """Read the notes of all bodies so far."""
    lines = (line.split() for line in lines_of(path))
    return [
        Note(word, key, int(attempt), int(pid), float(at_s))
        for word, key, attempt, pid, at_s in lines
    ]


def find(place: Workplace, flows: Sequence[int], bodies: Sequence[int]) -> dict[int, Target]:
    """Return what each process of a run is.

    Args:
        place: Where they run.
        flows: Process ids of the flows.
        bodies: Process ids of those that have begun a body.
    """
    commands = place.processes()
    found: dict[int, Target] = {}
    for pid, command in commands.items():
        if pid in flows:
            found[pid] = "flow"
        elif "guardian.py" in command:
            found[pid] = "guardian"
        elif command.strip().endswith(SOURCE_TITLE):
            forked = commands.get(_parent(pid), "").strip().endswith(SOURCE_TITLE)
            found[pid] = "child" if forked else "source"
        elif command.strip().endswith(STANDBY_TITLE) and pid not in bodies:
            found[pid] = "standby"
        elif "bootstrap.py" in command:
            found[pid] = "child"
    return found


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(stat.rpartition(") ")[2].split()[1])
    return 0


class Disk:
    """A small disk for temporary files. Only root may mount one.

    Args:
        folder: Empty; the disk is mounted there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "chaos", str(folder)]
        try:
            #: Whether there is one.
            self.mounted = subprocess.run(mount, capture_output=True).returncode == 0
        except FileNotFoundError:
            self.mounted = False
        self.temporary.mkdir()

    def fill(self) -> None:
        """Leave no byte free."""
        with contextlib.suppress(OSError), open(self.folder / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def empty(self) -> None:
        """Remove what fills it."""
        (self.folder / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it."""
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class Faults:
    """Carries out the faults of a plan when their time has come.

    Args:
        plan: See `plan.faults`.
        place: Where the processes run.
        proxy: Between them and Prefect's server.
        disk: Of their temporary files.
        notes: Of the bodies.
    """

    def __init__(
        self, plan: Iterator[Fault], place: Workplace, proxy: Proxy, disk: Disk, notes: Path
    ) -> None:
        self._plan = plan
        self._place = place
        self._proxy = proxy
        self._disk = disk
        self._notes = notes
        self._next: Fault | None = next(plan)
        #: What ends, and when.
        self._until: list[tuple[float, Fault, int]] = []
        #: Process ids of flows that were killed.
        self.killed_flows: set[int] = set()
        #: Process ids of those that were stopped and not continued yet.
        self._stopped: set[int] = set()
        #: Children and standbys that were killed.
        self.kills = 0
        #: When a process of each id was killed, on the clock of `time.monotonic`.
        self.killed_s: dict[int, list[float]] = {}
        #: How often each sort of fault was carried out.
        self.counts: dict[str, int] = {}

    def step(self, now_s: float, flows: Mapping[int, object]) -> None:
        """Carry out what is due.

        Args:
            now_s: Since the begin of the run.
            flows: The process ids of the flows that run.
        """
        for ended in [each for each in self._until if each[0] <= now_s]:
            self._until.remove(ended)
            self._end(ended[1], ended[2])
        while self._next is not None and self._next.at_s <= now_s:
            fault, self._next = self._next, next(self._plan)
            # What was due while this process was held up is not caught up all at once.
            if now_s - fault.at_s < 5.0:
                self._begin(fault, now_s, list(flows))

    def end(self) -> None:
        """Begin no more, and end what lasts."""
        self._next = None
        for _, fault, pid in self._until:
            self._end(fault, pid)
        self._until = []

    def _begin(self, fault: Fault, now_s: float, flows: list[int]) -> None:
        pid = 0
        if fault.kind in ("kill", "stop"):
            bodies = [note.pid for note in read_notes(self._notes)]
            found = find(self._place, flows, bodies)
            pids = sorted(
                pid
                for pid, target in found.items()
                if target == fault.target and pid not in self._stopped
            )
            if not pids:
                return
            pid = pids[int(fault.pick * len(pids))]
        if any(lasting.kind == fault.kind != "stop" for _, lasting, _ in self._until):
            return
        if fault.kind == "kill":
            self._kill(pid, fault.target)
        elif fault.kind == "stop":
            if not _send(pid, signal.SIGSTOP):
                return
            self._stopped.add(pid)
        elif fault.kind == "outage":
            if fault.harsh:
                self._proxy.choose_answer = lambda what: Answer(503)
            else:
                self._proxy.go_away()
        elif not self._disk.mounted:
            return
        else:
            self._disk.fill()
        if fault.kind != "kill":
            self._until.append((now_s + fault.seconds, fault, pid))
        print(f"  {now_s:6.1f} s  {fault} {pid or ''}", flush=True)
        name = f"{fault.kind} {fault.target}".strip()
        if fault.harsh:
            name += " then kill" if fault.kind == "stop" else " (503)"
        self.counts[name] = self.counts.get(name, 0) + 1

    def _end(self, fault: Fault, pid: int) -> None:
        if fault.kind == "outage":
            if fault.harsh:
                self._proxy.choose_answer = lambda what: None
            else:
                self._proxy.come_back()
        elif fault.kind == "full disk":
            self._disk.empty()
        else:
            self._stopped.discard(pid)
            if fault.harsh:
                self._kill(pid, fault.target)
            else:
                _send(pid, signal.SIGCONT)

    def _kill(self, pid: int, target: Target) -> None:
        if _send(pid, signal.SIGKILL):
            # After the signal: what the process wrote down was before.
            self.killed_s.setdefault(pid, []).append(time.monotonic())
            if target == "flow":
                self.killed_flows.add(pid)
        self.kills += target in ("child", "standby")


def _send(pid: int, signum: signal.Signals) -> bool:
    try:
        os.kill(pid, signum)
    except OSError as error:
        if error.errno != errno.ESRCH:
            raise
        return False
    return True

"""What the pool knows of the processes that wait, and of the runners that want them.

Values only: what becomes of them is `standby`'s to say, under its lock. What is known of their kinds is `kinds`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from prefect_gpu.processes.heater import Heater, Lent
from prefect_gpu.processes.kind import Kind
from prefect_gpu.processes.launcher import Handle
from prefect_gpu.processes.spec import WarmSpec

#: The order in which standbys are made and tasks announced.
serials = itertools.count()


@dataclass(eq=False)
class Standby:
    """One process that waits, or imports."""

    kind: Kind
    #: As it was started: users' modules may have been left out, the environment completed.
    spec: WarmSpec
    flags: tuple[str, ...]
    started_s: float
    serial: int = field(default_factory=lambda: next(serials))
    handle: Handle | None = None
    pid: int | None = None
    ready: bool = False
    #: Ended by us.
    ended: bool = False
    #: A device is asked for, or was had.
    heating: bool = False
    #: What it has of that device, and it is for tasks there alone; `None`: nothing yet.
    lent: Lent | None = None
    #: Monotonic seconds since when its framework starts; `None`: it does not, or has.
    heating_since_s: float | None = None
    #: Its framework has started.
    hot: bool = False

    @property
    def id(self) -> str:
        """What it is called in the ledger."""
        return f"standby-{os.getpid()}-{self.serial}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment that what it has done so far rests on."""
        changed: dict[str, str | None] = dict(self.spec.environment)
        if self.lent is not None:
            changed.update(self.lent.environment)
        return {name: value for name, value in changed.items() if value is not None}


@dataclass(eq=False)
class Owner:
    """A runner that is open."""

    #: Standbys at most; `None`: not known yet.
    most: int
    #: Host memory promised to its processes that they have not taken.
    promised_bytes: Callable[[], int]
    #: Whether a task of its waits for memory of the machine itself.
    wants_room: Callable[[], bool]
    #: Lends its devices to hot standbys; `None`: it wants none.
    heater: Heater | None = None

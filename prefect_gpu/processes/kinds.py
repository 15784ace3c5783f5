"""What is known of each kind of standby, and what follows: who wants one, what it imports, which start on a device.

Called under the pool's lock, with none of its own. What a kind is, is `kind`'s to say; how many there are is
decided in `scheduling.standbys`; what becomes of a process that died or does not suit its task, in `standby`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from prefect_gpu.processes.heater import Heater
from prefect_gpu.processes.kind import Kind
from prefect_gpu.processes.messages import Warmed
from prefect_gpu.processes.waiting import Standby
from prefect_gpu.scheduling.standbys import KindDemand

logger = logging.getLogger(__name__)

#: Standbys of a kind that may die one after another before they have taken a task, or not suit the task
#: that they were made for, before the kind is left alone.
MOST_DEATHS = 3
MOST_MISFITS = 3


@dataclass(eq=False)
class KindState:
    """What is known of a kind."""

    kind: Kind
    #: Host memory that one takes (bytes): as the kind says until one was measured.
    size_bytes: int
    #: Of those that had not taken a task, since the last one that did.
    deaths: int = 0
    #: Monotonic seconds when one did not suit its task: those that were made before would not either.
    unsuited_s: float = float("-inf")
    misfits: int = 0
    #: Of hot ones alone: theirs is the stricter rule.
    hot_misfits: int = 0
    #: What the user's modules do as they are imported would come too early for a task.
    without_users: bool = False
    #: Why no more of them are made; empty: they are.
    useless: str = ""
    #: Lends devices to them; `None`: they import, and no more.
    heater: Heater | None = None
    #: Devices where their framework did not start.
    cold_uuids: set[str] = field(default_factory=set)
    #: Monotonic seconds before which no device is asked for.
    cool_until_s: float = 0.0

    @property
    def modules(self) -> tuple[str, ...]:
        """What the next one imports."""
        made = self.kind.without_users() if self.without_users else self.kind
        return made.modules

    @property
    def spare(self) -> int:
        """How many are for tasks that are placed on another device than the hot ones."""
        return int(self.heater is not None and self.heater.device_count > 1)

    def heater_at(self, now_s: float) -> Heater | None:
        """Give who is asked for a device at a monotonic time; `None`: nobody."""
        asked = self.hot_misfits < MOST_MISFITS and now_s >= self.cool_until_s
        return self.heater if asked else None

    def take_warmed(self, warmed: Warmed, modules: tuple[str, ...]) -> None:
        """One has imported.

        Args:
            warmed: How that went.
            modules: What it imported.
        """
        if not warmed.problem:
            if warmed.resident_bytes:
                self.size_bytes = warmed.resident_bytes
        elif modules != self.kind.without_users().modules:
            # By what this one imported: several may have been made before the first was heard.
            self.without_users = True
            logger.debug("standbys import nothing of the user's from now on: %s", warmed.problem)
        else:
            self._leave_alone(warmed.problem)

    def take_misfit(self) -> None:
        """One that was made for this kind does not suit it: the parent's environment has changed since."""
        self.misfits += 1
        if self.misfits >= MOST_MISFITS:
            self._leave_alone("the environment changes from task to task")

    def take_hot_misfit(self) -> None:
        """A hot one does not suit the task that it was kept for."""
        self.hot_misfits += 1
        if self.hot_misfits == MOST_MISFITS:
            logger.debug(
                "standbys for %s are hot no more: the environment changes from task to task in what "
                "is read as a framework starts",
                self.kind.modules,
            )

    def take_cold(self, uuid: str, problem: str) -> None:
        """The framework does not start on a device: not for this kind, not again."""
        if uuid not in self.cold_uuids:
            self.cold_uuids.add(uuid)
            logger.warning(
                "no standby starts %s on device %s ahead of its task any more: %s",
                self.kind.hot,
                uuid,
                problem,
            )

    def take_death(self, modules: tuple[str, ...], how: str, stderr_tail: str = "") -> None:
        """One died before it had taken a task.

        Args:
            modules: What it was to import.
            how: In words that follow "since".
            stderr_tail: The end of what it printed there.
        """
        self.deaths += 1
        if self.deaths >= MOST_DEATHS and not self.useless:
            self.useless = how
            logger.warning(
                "no process is started ahead of its task any more for %s: %d of them in a row died before "
                "they had taken one, the last since %s%s",
                ", ".join(modules),
                self.deaths,
                how,
                f"; the end of its stderr:\n{stderr_tail[-1000:]}" if stderr_tail else "",
            )

    def _leave_alone(self, why: str) -> None:
        if not self.useless:
            self.useless = why
            logger.debug("no standbys are kept for %s: %s", self.kind.modules, why)


class Kinds:
    """All kinds that the pool has met, and the order in which tasks used them."""

    def __init__(self) -> None:
        self._states: dict[Kind, KindState] = {}
        #: Kinds of which a task was started, the last one last.
        self._used: dict[Kind, None] = {}

    def of(self, kind: Kind) -> KindState:
        """Give what is known of a kind, to be changed in place; at first nothing is."""
        return self._states.setdefault(kind, KindState(kind, kind.size_bytes))

    def use(self, kind: Kind) -> None:
        """A task of a kind was started."""
        self._used.pop(kind, None)
        self._used[kind] = None

    def keep_heaters(self, heaters: Collection[Heater | None]) -> None:
        """Forget whoever lends devices and is not among these."""
        for state in self._states.values():
            if state.heater not in heaters:
                state.heater = None

    def forget(self) -> None:
        """Start anew: a kind that was given up may have a better time."""
        self._states.clear()
        self._used.clear()

    def demands(self, announced: Sequence[Kind], standbys: Collection[Standby]) -> list[KindDemand]:
        """Tell for every kind that is wanted or exists who wants it, the most urgent first.

        Args:
            announced: The kind of each task that was submitted and has no process, in their order.
            standbys: All that there are.
        """
        # Those who came first are served first.
        kinds = dict.fromkeys(announced)
        latest = next(reversed(self._used), None)
        alive = {s.kind for s in standbys}
        for kind in reversed(self._used):
            if kind == latest or kind in alive:
                kinds.setdefault(kind)
        kinds.update((s.kind, None) for s in standbys)
        demands = []
        for kind in kinds:
            own = [s for s in standbys if s.kind == kind and not s.ended]
            state = self.of(kind)
            demands.append(
                KindDemand(
                    kind,
                    waiting=announced.count(kind),
                    latest=kind == latest,
                    used=kind in self._used,
                    size_bytes=state.size_bytes,
                    ready=sum(s.ready for s in own),
                    warming=sum(not s.ready for s in own),
                    useful=not state.useless,
                    spare=state.spare,
                )
            )
        return demands

    def choose_to_heat(
        self, standbys: Iterable[Standby], now_s: float
    ) -> list[tuple[Standby, Heater, frozenset[str]]]:
        """Choose those that are to start their framework on a device.

        Args:
            standbys: All that there are.
            now_s: Monotonic.

        Returns:
            Each with who is asked for a device, and the UUIDs of those where its kind does not start.
        """
        chosen = []
        plain: dict[Kind, int] = {}
        for standby in standbys:
            state = self.of(standby.kind)
            heater = state.heater_at(now_s)
            free = standby.ready and not standby.ended and not standby.heating
            if free and heater is not None:
                plain[standby.kind] = plain.get(standby.kind, 0) + 1
                if plain[standby.kind] > state.spare:
                    chosen.append((standby, heater, frozenset(state.cold_uuids)))
        return chosen

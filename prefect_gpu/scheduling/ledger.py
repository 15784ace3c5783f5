"""The protocol of a ledger: who has promised which bytes to whom.

A decision is made on a version of the ledger and written only if that version still stands
(compare and swap), so two schedulers can never promise the same bytes twice. The ledger of one
Python process is in `prefect_gpu.ledger`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prefect_gpu.scheduling.model import Reservation


@dataclass(frozen=True, slots=True)
class LedgerView:
    """All promises at one version."""

    version: int
    reservations: tuple[Reservation, ...]
    #: Process id to the request that it runs for: what such a process holds is not foreign, whoever
    #: of us started it.
    processes: Mapping[int, str] = field(default_factory=dict)


class Ledger(Protocol):
    """Holds reservations, keyed by host and device UUID. Safe to use from several threads."""

    def view(self) -> LedgerView:
        """Give all reservations and the version that they stand at."""
        ...

    def try_reserve(
        self, version: int, reservations: Sequence[Reservation], instead_of: Sequence[str] = ()
    ) -> bool:
        """Write all reservations if `version` still stands; else write none.

        Args:
            version: Of the view on which they were decided.
            reservations: What to write.
            instead_of: Requests whose reservations are taken back in the same step.

        Returns:
            Whether they were written.
        """
        ...

    def lend(self, request_id: str, give_up: Callable[[], None]) -> None:
        """Say how to ask for a hot standby's reservation back: see `reclaim`."""
        ...

    def reclaim(self, request_id: str) -> None:
        """Ask whoever holds a hot standby's reservation to give it up; others are ignored.

        It is released once its memory is back.
        """
        ...

    def attach(self, request_id: str, pid: int) -> None:
        """Say which process holds what was promised; it replaces one that was named before."""
        ...

    def release(self, request_id: str) -> None:
        """Take back all reservations of one request; unknown ones are ignored."""
        ...

    def renew(self, owner_pid: int, owner_started_s: float) -> None:
        """Tell that the owner of reservations lives; those of dead owners may be taken back."""
        ...

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` after every release, from any thread.

        Returns:
            A function that ends the watch.
        """
        ...

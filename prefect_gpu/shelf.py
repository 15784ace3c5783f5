"""The hot standbys of one broker: which there are, and which a task may take.

A book, not safe to use from several threads at once; `broker` keeps it. Who takes one, and which must
go, is decided in `scheduling.hot`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from prefect_gpu.scheduling.model import DeviceKey
from prefect_gpu.ticket import Loan


class Shelf:
    """Loans by id, the oldest first."""

    def __init__(self) -> None:
        self._loans: dict[str, Loan] = {}

    @property
    def loans(self) -> Collection[Loan]:
        """All that hold something which is no task's, as they are now."""
        return tuple(self._loans.values())

    @property
    def offers(self) -> Mapping[str, Hashable]:
        """Kinds of those that a task may take, by id."""
        return {i: loan.kind for i, loan in self._loans.items() if loan.offered}

    def add(self, loan: Loan) -> Loan:
        """Put one down."""
        self._loans[loan.id] = loan
        return loan

    def take(self, loan_id: str) -> Loan:
        """Give one to a task."""
        return self._loans.pop(loan_id)

    def remove(self, loan: Loan) -> bool:
        """Strike one out; tell whether it was there."""
        return self._loans.pop(loan.id, None) is not None

    def holds(self, loan: Loan) -> bool:
        """Tell whether one is there: a task's is not."""
        return loan.id in self._loans

    def count(self, kind: Hashable, key: DeviceKey) -> int:
        """Count those of a kind on a device."""
        return sum(loan.kind == kind and loan.device.key == key for loan in self._loans.values())

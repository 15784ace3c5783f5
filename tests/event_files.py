"""Files of the events that a broker's machine has handled, and their replay by a new machine.

A file begins with the arguments of the machine. Each record after that has an event, its time, the facts about tickets
that other threads have set meanwhile, and the commands as text. A ticket is written as the id of its request.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from prefect_gpu.broker.events import Append, Appended, Command, Event, Handle
from prefect_gpu.broker.machine import Machine
from prefect_gpu.broker.ticket import Ticket
from prefect_gpu.scheduling.model import Request


class Facts(NamedTuple):
    """Fields of a ticket that other threads set, and a machine reads."""

    pid: int | None
    stand_in_bytes: int
    may_leave: bool
    is_measured: bool
    is_held_back: bool


class Record(NamedTuple):
    """One event."""

    event: Event
    now_s: float
    #: By request id: facts that have changed since the last event.
    facts: dict[str, Facts]
    #: A watcher wants readings.
    watched: bool
    #: Facts have changed while the event was handled, so a replay may decide otherwise.
    torn: bool
    commands: list[str]


def describe(command: Command) -> str:
    """Return a command as text that is the same in each process."""
    ticket: Ticket | None = getattr(command, "ticket", None)
    if ticket is not None:
        command = replace(command, ticket=ticket.request.id)  # type: ignore[arg-type]
    return re.sub(r" at 0x[0-9a-f]+", "", repr(command))


class _Pickler(pickle.Pickler):
    def persistent_id(self, found: object) -> Request | None:
        return found.request if isinstance(found, Ticket) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: gzip.GzipFile, tickets: dict[str, Ticket]) -> None:
        super().__init__(file)
        self._tickets = tickets

    def persistent_load(self, request: Request) -> Ticket:
        return self._tickets.setdefault(request.id, Ticket(request))


def record(path: Path) -> Callable[[Machine], Handle]:
    """Return the argument `record` of a broker that writes its events to a file."""

    def of_machine(machine: Machine) -> Handle:
        # Open until the end of the process, as the broker.
        file, known = gzip.open(path, "wb", compresslevel=1), machine.known  # noqa: SIM115
        told: dict[str, Facts] = {}

        def write(what: object) -> None:
            buffer = io.BytesIO()
            _Pickler(buffer).dump(what)
            file.write(buffer.getvalue())
            # A process that is killed leaves whole records.
            file.flush()

        def facts() -> dict[str, Facts]:
            tickets = (*known.own.values(), *known.recovery.ending.values())
            return {
                each.request.id: Facts(
                    each.pid,
                    each.stand_in_bytes,
                    each.may_leave,
                    each.on_measured is not None,
                    each.on_held_back is not None,
                )
                for each in tickets
            }

        def handle(event: Event, now_s: float) -> list[Command]:
            nonlocal told
            before, watched = facts(), machine.watched
            changed = {i: each for i, each in before.items() if told.get(i) != each}
            commands = machine.handle(event, now_s)
            told, after = before, facts()
            own = getattr(event, "ticket", None)
            torn = any(
                i in before and before[i] != after[i] and (own is None or own.request.id != i)
                for i in after
            )
            if isinstance(event, Appended):
                # The plan of the last `Append`.
                event = replace(event, plan=None)  # type: ignore[arg-type]
            write(Record(event, now_s, changed, watched, torn, [*map(describe, commands)]))
            return commands

        write((known.settings, known.devices, known.ledger))
        return handle

    return of_machine


class Replayed(NamedTuple):
    """The result of a replay."""

    events: int
    #: Commands that were recorded, or were returned in the replay, but not both.
    differences: list[str]


def replay(path: Path) -> Replayed:
    """Feed the events of a file to a new machine, until a difference or a torn record decides otherwise."""
    tickets: dict[str, Ticket] = {}

    def load() -> Iterator[Any]:
        with gzip.open(path, "rb") as file, contextlib.suppress(EOFError):
            while True:
                yield _Unpickler(file, tickets).load()

    records = load()
    machine = Machine(*next(records))
    plan: Any = None
    number = 0
    for number, each in enumerate(records, start=1):
        set_facts(tickets, each.facts)
        machine.watched = each.watched
        event = replace(each.event, plan=plan) if isinstance(each.event, Appended) else each.event
        commands = machine.handle(event, each.now_s)
        plan = next((c.plan for c in commands if isinstance(c, Append)), plan)
        if (found := [*map(describe, commands)]) != each.commands:
            if each.torn:
                break
            return Replayed(number, differences(number, each, found))
    return Replayed(number, [])


def set_facts(tickets: dict[str, Ticket], facts: dict[str, Facts]) -> None:
    """Set the facts of tickets before an event."""
    for request_id, each in facts.items():
        ticket = tickets[request_id]
        ticket.pid, ticket.stand_in_bytes, ticket.may_leave = each[:3]
        ticket.on_measured = (lambda at_s, found: None) if each.is_measured else None
        ticket.on_held_back = (lambda away: None) if each.is_held_back else None


def differences(number: int, record: Record, found: Sequence[str]) -> list[str]:
    """Return as text how the commands of a replay differ from those of a record, from the first different character."""
    name = f"event {number}, {type(record.event).__name__}"
    recorded = [each for each in record.commands if each not in found]
    replayed = [each for each in found if each not in record.commands]
    pairs = enumerate(zip("".join(recorded[:1]), "".join(replayed[:1]), strict=False))
    start = max(0, next((at for at, (one, other) in pairs if one != other), 0) - 100)
    return [
        *(f"{name}: only recorded, from character {start}: {each[start:]}" for each in recorded),
        *(f"{name}: only replayed, from character {start}: {each[start:]}" for each in replayed),
    ] or [f"{name}: the commands are in another order"]

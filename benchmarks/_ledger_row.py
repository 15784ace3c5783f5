"""What the ledger of a machine costs, measured in the process that this is run in; a part of `overhead.py`.

A task changes the ledger five times: it waits, it is placed, it has a process, its body begins, its memory is
back. Another process reads along, as a second flow does. Beside it: the same with a ledger that is not shared.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import _common

sys.path.insert(0, str(_common.REPOSITORY))

from prefect_gpu.broker.broker import Broker, next_sequence
from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import Entry, Ledger
from prefect_gpu.broker.phases import Phase
from prefect_gpu.broker.preempting import start
from prefect_gpu.devices.simulated import SimulatedDevices, SimulatedReader
from prefect_gpu.scheduling.model import Request, Reservation
from prefect_gpu.units import GIB

#: Tasks whose entries are in the ledger all the time, as of other flows.
STANDING = 50

#: Reads along until its input ends.
READER = """
import select, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from prefect_gpu.broker.host_ledger import HostStore
from prefect_gpu.broker.ledger import Ledger
ledger = Ledger(lambda: HostStore(Path(sys.argv[1])))
print("reads", ledger.view().tasks, flush=True)
while not select.select([sys.stdin], [], [], 0.02)[0]:
    ledger.poll()
"""


def measure(tasks: int, idle_s: float) -> dict[str, Any]:
    """Return seconds and CPU a task, and the share of a core that an idle broker takes."""
    with tempfile.TemporaryDirectory() as folder:
        shared = Ledger(partial(HostStore, Path(folder)))
        program = [sys.executable, "-c", READER, folder, str(_common.REPOSITORY)]
        with subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as reader:
            assert reader.stdout is not None and reader.stdout.readline().startswith("reads")
            found = {
                "tasks": tasks,
                **_per_task("shared", shared, tasks),
                **_per_task("alone", Ledger(), tasks),
            }
            assert reader.stdin is not None
            reader.stdin.close()
        found["idle_cores"] = _idle(shared, idle_s, waits=False)
        found["waiting_cores"] = _idle(shared, idle_s, waits=True)
        found["waiting_alone_cores"] = _idle(Ledger(), idle_s, waits=True)
        return found


def _per_task(name: str, ledger: Ledger, tasks: int) -> dict[str, float]:
    for at in range(STANDING):
        _write(ledger, _entry(f"standing {at}", placed=True))
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for at in range(tasks):
        request_id = f"task {at}"
        waits = _entry(request_id, placed=False)
        _write(ledger, waits)
        _write(ledger, replace(_entry(request_id, placed=True), request=waits.request))
        for change in (partial(start, pid=4242), partial(replace, running=True)):
            ledger.rewrite(request_id, change, announces=False)
        ledger.release(request_id)
    return {
        f"{name}_ms": (time.perf_counter() - began_s) / tasks * 1000,
        f"{name}_cpu_ms": (time.process_time() - began_cpu_s) / tasks * 1000,
    }


def _entry(request_id: str, placed: bool) -> Entry:
    request = Request(request_id, "a task", next_sequence(), 0.0, GIB)
    held = (Reservation(request_id, "here", "SIM-0", GIB, task_name="a task"),) if placed else ()
    phase = Phase.PLACED if placed else Phase.WAITING
    return Entry(
        request, phase=phase, reservations=held, devices=(("here", "SIM-0"),), max_processes=8
    )


def _write(ledger: Ledger, entry: Entry) -> None:
    while not ledger.try_write(ledger.view().version, {entry.request.id: entry}):
        pass


def _idle(ledger: Ledger, seconds: float, waits: bool) -> float:
    """Return the share of a core that a broker takes in which nothing runs, or one task waits for another flow's."""
    held = Reservation("held", "", "", 24 * GIB)
    broker = Broker(SimulatedReader(SimulatedDevices("1x24GiB")), ledger)
    if waits:
        device = broker.devices[0]
        held = replace(held, machine=device.key[0], device_uuid=device.uuid)
        asked = Request("held", "held", 0, 0.0)
        _write(ledger, Entry(asked, phase=Phase.PLACED, reservations=(held,)))
    ticket = broker.submit(Request("", "task", next_sequence(), 0.0, 20 * GIB))
    if not waits:
        _until(lambda: ticket.decided)
        broker.end(ticket)
    # Its first readings are over.
    time.sleep(1.0)
    began = time.process_time()
    time.sleep(seconds)
    share = (time.process_time() - began) / seconds
    assert ticket.decided is not waits
    broker.withdraw(ticket)
    ledger.release("held")
    return share


def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.01)

"""The child: one process, one task, then the end.

The bootstrap has made the interpreter like the parent's. Here the policy is put in place, the call
is read and run, and its outcome is sent. Nothing of the user's is imported before the policy stands.
What the outcome means is the parent's business.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import traceback
from typing import Any

from prefect_gpu import inside
from prefect_gpu.errors import ResultError
from prefect_gpu.frameworks import calibration, hooks, registry
from prefect_gpu.frameworks.adapter import Counters, FrameworkAdapter
from prefect_gpu.frameworks.out_of_memory import OutOfMemory, parse_wanted_bytes
from prefect_gpu.processes import values
from prefect_gpu.processes.call import Call, run_body
from prefect_gpu.processes.channel import Channel, set_current_channel
from prefect_gpu.processes.messages import (
    Body,
    BodyEnded,
    BodyStarted,
    CountersRead,
    Prepare,
    decode,
)


def main(descriptor: int) -> None:
    """Run the one task that this process was made for.

    Args:
        descriptor: Of the channel to the parent.
    """
    channel = Channel(descriptor)
    set_current_channel(channel)
    try:
        prepare: Prepare = decode(channel.receive())
        inside.set_current_allocation(prepare.allocation)
        if prepare.work == "calibrate":
            _calibrate(channel, prepare)
        else:
            _run(channel, prepare)
        # Ending as if it had never been set aside: what the imports left open is closed quietly.
        gc.unfreeze()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The parent is gone; there is nobody to tell. The guardian ends the rest.
        os._exit(1)


def _calibrate(channel: Channel, prepare: Prepare) -> None:
    channel.receive()
    channel.send(BodyStarted())
    try:
        hooks.install(registry.adapters_for(prepare.policy), prepare.policy)
        reserved = calibration.run_calibration(prepare.framework)
    except BaseException as error:
        data, _ = values.dump_exception(error)
        channel.send_with_value(BodyEnded(raised=True, traceback=traceback.format_exc()), data)
        return
    data = values.dumps(reserved, "return value", "result")
    channel.send_with_value(BodyEnded(raised=False), data)
    # The parent reads the device while we still hold it, then closes the channel.
    try:
        channel.receive()
    except EOFError:
        return


def _run(channel: Channel, prepare: Prepare) -> None:
    reducers = tuple(adapter.reduce_to_host for adapter in registry.ADAPTERS.values())
    adapters = registry.adapters_for(prepare.policy)
    watch = _CountersWatch(channel, adapters, prepare.counters_interval_s)
    raised: BaseException | None = None
    result: Any = None
    text = ""
    try:
        hooks.install(adapters, prepare.policy)
        # No name for the bytes: they go as soon as they are read.
        call = _load_call(channel.receive())
        with _surroundings(call, channel):
            watch.start()
            _collect_garbage_again()
            channel.send(BodyStarted())
            try:
                result = run_body(call)
            finally:
                watch.stop()
    except BaseException as error:
        raised = error
        text = _format_traceback(error)
    out_of_memory = None if raised is None else _out_of_memory(raised, adapters)
    if raised is None:
        try:
            data = values.dumps(result, "return value", "result", reducers)
        except BaseException as error:
            raised = error
            text = _format_traceback(error)
    if raised is not None:
        data, _ = values.dump_exception(raised, reducers)
    counters, frameworks = watch.last()
    channel.send_with_value(
        BodyEnded(
            raised is not None, out_of_memory, text, counters, frameworks, _host_peak_bytes()
        ),
        data,
    )


def _host_peak_bytes() -> int:
    """Give the largest resident set of this process so far; 0: cannot be told."""
    # Not `ru_maxrss`: on Linux it begins with what the parent had before the exec.
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _collect_garbage_again() -> None:
    """Undo what the bootstrap did for the imports; what they made will stay, so it is set aside."""
    gc.freeze()
    gc.enable()


def _load_call(payload: Body) -> Call:
    try:
        call: Call = values.load_call(payload)
    except (ImportError, AttributeError, pickle.UnpicklingError) as error:
        raise ResultError(
            "call", "it", "function or argument that the child cannot import", str(error)
        ) from error
    return call


def _surroundings(call: Call, channel: Channel) -> Any:
    # Imported late: a calibration, or a call without Prefect, needs no second of importing it.
    if call.context is None:
        import contextlib

        return contextlib.nullcontext()
    from prefect_gpu import prefect_bridge

    return prefect_bridge.child_context(call.context, call.log_prints, channel.send)


def _format_traceback(error: BaseException) -> str:
    """Give the traceback as text, without the frames of this package above the body's."""
    frames = traceback.TracebackException.from_exception(error, capture_locals=False)
    own = os.path.dirname(__file__)
    while len(frames.stack) > 1 and frames.stack[0].filename.startswith(own):
        frames.stack.pop(0)
    return "".join(frames.format())


def _out_of_memory(
    error: BaseException, adapters: tuple[FrameworkAdapter, ...]
) -> OutOfMemory | None:
    """Look for an out-of-memory in an error and what caused it."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        try:
            if getattr(current, "__prefect_gpu_out_of_memory__", False):
                return OutOfMemory("", parse_wanted_bytes(str(current)))
            for adapter in adapters:
                if adapter.is_out_of_memory(current):
                    return OutOfMemory(adapter.name, parse_wanted_bytes(str(current)))
        except Exception:
            # An error of the user's whose own text or attributes raise: no adapter's.
            pass
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return None


class _CountersWatch:
    """Sends the frameworks' counters now and then, from a thread of its own."""

    def __init__(
        self, channel: Channel, adapters: tuple[FrameworkAdapter, ...], interval_s: float
    ) -> None:
        self._channel = channel
        self._adapters = adapters
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._last: Counters | None = None

    def start(self) -> None:
        threading.Thread(target=self._watch, name="prefect-gpu-counters", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def last(self) -> tuple[Counters | None, tuple[str, ...]]:
        """Give the counters as they stand, and the frameworks that were used."""
        try:
            self._last = hooks.collect_counters(self._adapters) or self._last
        except Exception as error:
            print(f"prefect_gpu: counters cannot be read: {error!r}", file=sys.stderr)
        return self._last, hooks.frameworks_in_use()

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval_s):
            before = self._last
            counters, frameworks = self.last()
            if counters is not None and counters != before:
                try:
                    self._channel.send(CountersRead(counters, frameworks))
                except OSError:
                    return

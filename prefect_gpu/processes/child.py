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
import traceback
from typing import Any

from prefect_gpu import inside
from prefect_gpu.errors import ResultError
from prefect_gpu.frameworks import calibration, hooks, registry
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.processes import ending, values, warming
from prefect_gpu.processes.call import Call, run_body
from prefect_gpu.processes.channel import Channel, set_current_channel
from prefect_gpu.processes.messages import (
    Accepted,
    BodyEnded,
    BodyStarted,
    Heat,
    Prepare,
    decode,
)
from prefect_gpu.processes.readings import Readings
from prefect_gpu.processes.recorder import Recorder
from prefect_gpu.processes.sampler import LiveSampler
from prefect_gpu.processes.shortage import find_shortage
from prefect_gpu.processes.spec import UNSUITED_CODE
from prefect_gpu.processes.transport import Contents


def main(descriptor: int, warm: list[str] | None = None, forked: bool = False) -> None:
    """Run the one task that this process is for.

    Args:
        descriptor: Of the channel to the parent.
        warm: What to import before the task is known; `None`: it is known.
        forked: The process shares what a template made, which is not to be looked at.
    """
    channel = Channel(descriptor)
    try:
        if warm is not None:
            warmed = warming.warm_up(warm)
            channel.send(warmed)
            if warmed.problem:
                sys.stdout.flush()
                os._exit(0)
        message = decode(channel.receive())
        if isinstance(message, Heat):
            heated = warming.heat(message)
            channel.send(heated)
            if heated.problem:
                sys.stdout.flush()
                os._exit(0)
            message = decode(channel.receive())
        prepare: Prepare = message
        if prepare.late is not None:
            try:
                warming.catch_up(prepare.late)
            except (OSError, ImportError):
                # Its folder is gone, or its modules are others by now: for a process made for the task.
                os._exit(UNSUITED_CODE)
        # Not before: a module that asks the parent something at its import would wait for ever.
        set_current_channel(channel)
        inside.set_current_allocation(prepare.allocation)
        channel.send(Accepted())
        if prepare.work == "calibrate":
            _calibrate(channel, prepare)
        else:
            _run(channel, prepare, made_for_it=not forked and warm is None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The parent is gone; there is nobody to tell. The guardian ends the rest.
        os._exit(1)
    if not forked:
        ending.call_last_functions()
        ending.take_apart()


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


def _run(channel: Channel, prepare: Prepare, made_for_it: bool) -> None:
    reducers = tuple(adapter.reduce_to_host for adapter in registry.ADAPTERS.values())
    adapters = registry.adapters_for(prepare.policy)
    readings = Readings(prepare.policy, adapters)
    recorder = _install_recorder(readings)
    sampler = LiveSampler(channel, recorder, prepare.counters_interval_s)
    shortage: OutOfMemory | None = None
    raised: BaseException | None = None
    result: Any = None
    text = ""
    try:
        hooks.install(adapters, prepare.policy)
        if prepare.late is not None and prepare.late.hot:
            warming.hold_to(prepare.late.hot, prepare.policy)
        if made_for_it:
            warming.set_aside(prepare.libraries)
        # No name for the bytes: they go as soon as they are read.
        call = _load_call(channel.receive_value())
        with _surroundings(call, channel):
            sampler.start()
            _collect_garbage_again()
            channel.send(BodyStarted())
            recorder.begin()
            try:
                result = run_body(call)
            except BaseException as error:
                # At once: others take memory, and frames are let go.
                shortage = find_shortage(error, adapters, readings)
                raise
            finally:
                sampler.stop()
            recorder.finish()
    except BaseException as error:
        raised = error
        text = _format_traceback(error)
        # One while the call was read, or a framework put to use for it, counts as well.
        shortage = shortage or find_shortage(error, adapters, readings)
    inside.set_current_recorder(None)
    if raised is None:
        try:
            data = values.dumps(result, "return value", "result", reducers)
        except BaseException as error:
            raised = error
            text = _format_traceback(error)
    if raised is not None:
        data, _ = values.dump_exception(raised, reducers)
    counters, frameworks, steps, marks = sampler.last()
    channel.send_with_value(
        BodyEnded(
            raised is not None,
            shortage,
            text,
            counters,
            frameworks,
            _host_peak_bytes(),
            steps,
            marks,
        ),
        data,
    )


def _install_recorder(readings: Readings) -> Recorder:
    """Have `phase`, `mark` and `step` heard; in a fork (a worker of a data loader) they are not."""
    recorder = Recorder(readings)
    inside.set_current_recorder(recorder)

    def forget() -> None:
        inside.set_current_recorder(None)
        recorder.renew_lock()

    os.register_at_fork(after_in_child=forget)
    return recorder


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
    """Undo what the bootstrap did for the imports."""
    # The first pass looks at all that they made (0.1 s with PyTorch): it is not for the body to pay.
    gc.collect(0)
    gc.enable()


def _load_call(payload: Contents) -> Call:
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

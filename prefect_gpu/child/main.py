"""Main function of a child process, which runs one task and ends.

Applies the task's policy, reads the call (which imports the user's modules), runs the body, and sends the result or
exception. `bootstrap` runs before; `processes.messages` has the order of the messages.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from prefect_gpu import in_task, values
from prefect_gpu.child import exit as process_exit
from prefect_gpu.child import forks, warm_up
from prefect_gpu.child.channel import Channel, current_channel, set_current_channel
from prefect_gpu.child.late_prefect import LatePrefect
from prefect_gpu.child.readings import Readings
from prefect_gpu.child.recorder import LiveSampler, Recorder
from prefect_gpu.child.shortage import find_shortage
from prefect_gpu.devices.cuda_driver import context_fault, reset_context
from prefect_gpu.errors import FrameworkError, ProtocolError, add_note
from prefect_gpu.frameworks import hooks, registry
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.process_resources import read_own_bytes
from prefect_gpu.processes import mps
from prefect_gpu.processes.interpreter import InterpreterState
from prefect_gpu.processes.launch_spec import UNSUITED_CODE
from prefect_gpu.processes.messages import Accepted, BodyEnded, BodyStarted, Call, Prepare
from prefect_gpu.values import registrations, spawned, stand_ins, transport
from prefect_gpu.values.transport import PackedValue

#: Seconds between two looks at the context of a client of MPS, and after which a body must have noticed its assertion.
WATCH_S, GRACE_S = 0.05, 0.2


def main(descriptor: int, warm: list[str] | None = None, control: int | None = None) -> None:
    """Receive a task on the channel's `descriptor`, run the task, and send its result.

    `warm` has the modules that a warm process imports before it receives its task; `None`: a process for one task. A warm
    process with the socket `control` never receives a task: it is forked for each, and its forks return from here.
    """
    interrupts = _Interrupts()
    channel = Channel(descriptor)
    late_prefect = LatePrefect()
    forked = control is not None
    try:
        if warm is not None:
            done = warm_up.warm_up(warm, forked)
            channel.send(done)
            if done.problem:
                sys.stdout.flush()
                os._exit(0)
        if control is not None:
            # A fork has closed its copy of the warm process's channel.
            channel = Channel(forks.serve(socket.socket(fileno=control), descriptor))
        prepare = channel.receive()
        if not isinstance(prepare, Prepare):
            raise ProtocolError(f"the parent sent {prepare!r} where a task was expected")
        if prepare.late is not None:
            try:
                warm_up.become_task_process(prepare.late)
            except (OSError, ImportError):
                # The task's folder is gone, or modules have changed: the parent starts a fresh process.
                os._exit(UNSUITED_CODE)
        prepare.interpreter.apply()
        # After the imports of a warm process: a module that asks the parent a question there would wait for ever.
        set_current_channel(channel)
        in_task.set_current_allocation(prepare.allocation)
        channel.send(Accepted())
        _run(channel, prepare, late_prefect, interrupts, made_for_it=warm is None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The parent is gone.
        os._exit(1)
    process_exit.run_exit_functions()
    process_exit.finalise_users_modules()
    if forked:
        process_exit.end_unfinalised(warm_up.origin().opened)


class _Interrupts:
    """Handler of SIGINT in this process, which has no effect (see `bootstrap`) except while the task runs."""

    def __init__(self) -> None:
        self._without_effect = signal.getsignal(signal.SIGINT)

    def begin(self, flow: InterpreterState) -> None:
        """Handle SIGINT and block signals as the flow's process does; a handler set by a module stays."""
        if signal.getsignal(signal.SIGINT) is self._without_effect:
            ignored = flow.ignores_interrupt
            signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, flow.blocked_signals)

    def end(self) -> None:
        """Make SIGINT have no effect again; a handler set by the body stays."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._without_effect)


def _run(
    channel: Channel,
    prepare: Prepare,
    late_prefect: LatePrefect,
    interrupts: _Interrupts,
    made_for_it: bool,
) -> None:
    reducers = tuple(adapter.reduce_to_host for adapter in registry.ADAPTERS.values())
    adapters = registry.adapters_for(prepare.policy)
    names = [adapter.name for adapter in adapters]
    readings = Readings(prepare.policy, adapters)
    recorder = Recorder(readings)
    in_task.set_current_recorder(recorder)
    watch = None
    if mps.is_client(os.environ):
        watch = AssertionWatch(lambda: _end_at_assertion(channel, recorder, sampler))
    sampler = LiveSampler(channel, recorder, prepare.counters_interval_s, watch)
    shortage: OutOfMemory | None = None
    failed: BaseException | None = None
    raised, text = False, ""
    changes: PackedValue | None = None
    try:
        interrupts.begin(prepare.interpreter)
        hooks.install(adapters, prepare.policy)
        if made_for_it:
            for library in prepare.libraries:
                importlib.import_module(library)
            # Frozen libraries are not finalised at the end, which would keep the device's memory in use.
            gc.freeze()
        # First, as the call is the next frame: the functions below may ask the flow's process and read answers.
        received = [channel.receive_value()]
        stand_ins.set_source(functools.partial(_fetch, channel))
        stand_ins.install(prepare.private_modules, prepare.users_modules)
        spawned.install()
        # Imported late: it takes 10 ms.
        hooks.AfterImport({"multiprocessing.spawn": spawned.keep_main_from_running}).install()
        registrations.register_after_import(prepare.registered)
        # No name refers to the packed call, so that its memory is freed once the call is read.
        call = values.load_call(received.pop())
        with late_prefect.run(call, channel.send):
            sampler.start()
            # The first collection visits all imported objects (0.1 s with PyTorch): not in the body's time.
            gc.collect(0)
            gc.enable()
            prepare.interpreter.apply_before_body()
            channel.send(BodyStarted())
            recorder.begin()
            try:
                result = run_body(call)
                if mps.is_client(os.environ) and mps.is_fault(fault := context_fault()):
                    # The body may have caught the error that another client's fault gave it.
                    raise RuntimeError(f"The device failed while the task ran: {fault}")
            except BaseException as error:
                failed = error
                # At once, before other clients of MPS hang, and before other processes take memory.
                if fault := _spare_other_clients():
                    add_note(error, f"The device's context ended with {fault}.")
                shortage = find_shortage(error, names, readings)
                registrations.note_missing(error, call.function)
                late_prefect.roll_back()
                raise
            finally:
                interrupts.end()
                sampler.stop()
            recorder.finish()
            _spare_other_clients()
            changed = late_prefect.commit()
        in_task.set_current_recorder(None)
        if changed is not None:
            # Without memory files, since `BodyEnded` contains these bytes.
            pack = functools.partial(transport.pack, write=None)
            changes = values.dumps(changed, "transaction", "transaction", reducers, pack)
        data = values.dumps(result, "return value", "result", reducers)
    except BaseException as error:
        in_task.set_current_recorder(None)
        _spare_other_clients()
        if failed is None:
            # Memory may also run out as the call is read, a framework is set up, or the result is copied to the host.
            failed, shortage = error, find_shortage(error, names, readings)
        raised, text, changes = True, _format_traceback(failed), None
        data = values.dump_exception(failed, reducers)
    # The flow's process does not answer once it has the value.
    stand_ins.set_source(None)
    # On Linux `ru_maxrss` begins with the parent's memory before the exec.
    host_peak_bytes = read_own_bytes("VmHWM")
    measured = (*sampler.last(), host_peak_bytes, recorder.metrics)
    ended = BodyEnded(raised, shortage, text, *measured, changes)
    channel.send_with_value(ended, data)


class AssertionWatch:
    """Calls `end` if the body of a client of MPS goes on after a failed assertion on the device.

    Half a second after it, the kernels of all other clients hang, for good, unless its context is destroyed (H200, driver
    580). A body that raises the error has its own end, and its own error.
    """

    def __init__(
        self,
        end: Callable[[], None],
        fault: Callable[[], str] = context_fault,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end, self._fault, self._clock = end, fault, clock
        self._due_s = float("-inf")
        #: When the assertion was seen; `None`: none has failed.
        self._failed_s: float | None = None

    def __call__(self) -> None:
        """Look at the context, every `WATCH_S` seconds."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + WATCH_S
        if self._fault() != "CUDA_ERROR_ASSERT":
            self._failed_s = None
        elif self._failed_s is None:
            self._failed_s = now_s
        elif now_s >= self._failed_s + GRACE_S:
            self._end()


def _end_at_assertion(channel: Channel, recorder: Recorder, sampler: LiveSampler) -> NoReturn:
    """End this process; its task fails with an error that names the line at which the body was."""
    error = RuntimeError(
        f"An assertion failed on the device (CUDA_ERROR_ASSERT), and the body went on for {GRACE_S:g} s. Its process was "
        "ended, because the kernels of other clients of MPS would hang"
    )
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    text = "".join(traceback.format_stack(frame)) + f"RuntimeError: {error}\n"
    measured = (*sampler.last(), read_own_bytes("VmHWM"), recorder.metrics)
    channel.send_with_value(
        BodyEnded(True, None, text, *measured), values.dump_exception(error, ())
    )
    process_exit.flush_streams()
    os._exit(0)


def _spare_other_clients() -> str:
    """Return the fault that ended the device's context; "": none. A client of MPS destroys it: see `AssertionWatch`."""
    fault = context_fault()
    if fault and mps.is_client(os.environ):
        reset_context()
    return fault


def _fetch(channel: Channel, module: str, name: str) -> Any:
    """Return an attribute of a module of the flow's process; raise `AttributeError` if its value cannot be sent."""
    try:
        return channel.ask("attribute", module=module, name=name).load()
    except AttributeError:
        raise
    except Exception as error:
        text = f"{module}.{name} cannot be fetched from the flow's process: {error}"
        raise AttributeError(text) from error


def run_body(call: Call) -> Any:
    """Call the body and return its result: awaited for a coroutine, a list for a generator, as in Prefect."""
    result = call.function(*call.args, **call.kwargs)
    if inspect.isawaitable(result) or inspect.isasyncgen(result):
        # Imported late: it takes 25 ms.
        import asyncio

        return asyncio.run(_finish(result))
    if inspect.isgenerator(result):
        return list(result)
    return result


async def _finish(result: Any) -> Any:
    if inspect.isasyncgen(result):
        return [item async for item in result]
    return await result


def calibrate(framework: str) -> None:
    """Run as a body that measures a framework: use the device, and report the allocator's bytes to the parent.

    The parent does not answer, but ends this process when it has read the device's memory. Raise `FrameworkError` if
    the framework is not installed or fails on the device.
    """
    try:
        reserved_bytes = registry.ADAPTERS[framework].calibrate()
    except Exception as error:
        text = f"calibration failed: {type(error).__name__}: {error}"
        raise FrameworkError(framework, text) from error
    channel = current_channel()
    assert channel is not None
    channel.ask("calibrated", reserved_bytes=reserved_bytes)


def _format_traceback(error: BaseException) -> str:
    """Return the traceback as text, without this folder's frames that called the body."""
    frames = traceback.TracebackException.from_exception(error, capture_locals=False)
    own = os.path.dirname(__file__)
    while len(frames.stack) > 1 and frames.stack[0].filename.startswith(own):
        frames.stack.pop(0)
    return "".join(frames.format())

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
import time
import traceback
from collections.abc import Callable
from typing import Any

from prefect_gpu import in_task, values
from prefect_gpu.child import exit as process_exit
from prefect_gpu.child import forks, warm_up
from prefect_gpu.child.channel import Channel, current_channel, set_current_channel
from prefect_gpu.child.late_prefect import LatePrefect
from prefect_gpu.child.readings import Readings
from prefect_gpu.child.recorder import LiveSampler, Recorder
from prefect_gpu.child.shortage import find_shortage
from prefect_gpu.devices.cuda_driver import PER_THREAD, context_fault
from prefect_gpu.errors import FrameworkError, ProtocolError, add_note
from prefect_gpu.frameworks import hooks, registry
from prefect_gpu.frameworks.out_of_memory import OutOfMemory
from prefect_gpu.processes import mps
from prefect_gpu.processes.interpreter import InterpreterState
from prefect_gpu.processes.messages import Accepted, BodyEnded, BodyStarted, Call, Prepare
from prefect_gpu.values import registrations, spawned, stand_ins, transport
from prefect_gpu.values.transport import PackedValue

#: Seconds between two looks at the context of a client of MPS.
WATCH_S = 0.05

#: Begin of the text of an error if the body itself raises none after a fault.
FAILED = "The device failed while the task ran"

#: Seconds in which a body must end after a fault of its context.
GRACE_S = 5.0


def main(descriptor: int, warm: list[str] | None = None, control: int | None = None) -> None:
    """Receive a task on the channel's `descriptor`, run the task, and send its result.

    `warm` has the modules that a warm process imports before it receives its task; `None`: a process for one task. A warm
    process with the socket `control` never receives a task: it is forked for each, and its forks return from here.
    """
    interrupts = _Interrupts()
    channel = Channel(descriptor)
    late_prefect = LatePrefect()
    source = None if control is None else forks.Source(socket.socket(fileno=control))
    try:
        if warm is not None:
            done = warm_up.warm_up(warm, source)
            channel.send(done)
            if done.problem:
                sys.stdout.flush()
                os._exit(0)
        if source is not None:
            # A fork has closed its copy of the warm process's channel.
            channel = Channel(source.serve(descriptor))
        prepare = channel.receive()
        if not isinstance(prepare, Prepare):
            raise ProtocolError(f"the parent sent {prepare!r} where a task was expected")
        if prepare.late is not None:
            try:
                warm_up.become_task_process(prepare.late, os.getppid())
            except OSError:
                # The task's folder is gone: the parent starts a fresh process, which says so.
                os._exit(1)
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
    if source is not None:
        source.end()


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
    client: MpsClient | None = None
    if mps.is_client(os.environ):
        client = MpsClient(os.environ[mps.PIPES], lambda fault: _give_up(channel, sampler, fault))
    watch = client.look if client is not None else None
    sampler = LiveSampler(channel, recorder, prepare.counters_interval_s, watch)
    shortage: OutOfMemory | None = None
    failed: BaseException | None = None
    raised, text = False, ""
    changes: PackedValue | None = None
    context_bytes: int | None = None
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
                if client is not None and mps.is_fault(fault := context_fault()):
                    # The body may have caught the error that another client's fault gave it.
                    raise RuntimeError(f"{FAILED}: {fault}")
            except BaseException as error:
                failed = error
                # At once, before other clients of MPS hang, and before other processes take memory.
                if fault := _end_others(client):
                    add_note(error, f"The device's context ended with {fault}.")
                shortage = find_shortage(error, names, readings)
                registrations.note_missing(error, call.function)
                late_prefect.roll_back()
                raise
            finally:
                interrupts.end()
                sampler.stop()
            recorder.finish()
            _end_others(client)
            context_bytes = readings.context_bytes()
            changed = late_prefect.commit()
        in_task.set_current_recorder(None)
        if changed is not None:
            # Without memory files, since `BodyEnded` contains these bytes.
            pack = functools.partial(transport.pack, write=None)
            changes = values.dumps(changed, "transaction", "transaction", reducers, pack)
        data = values.dumps(result, "return value", "result", reducers)
    except BaseException as error:
        in_task.set_current_recorder(None)
        _end_others(client)
        if failed is None:
            # Memory may also run out as the call is read, a framework is set up, or the result is copied to the host.
            failed, shortage = error, find_shortage(error, names, readings)
        raised, text, changes = True, _format_traceback(failed), None
        data = values.dump_exception(failed, reducers)
    # The flow's process does not answer once it has the value.
    stand_ins.set_source(None)
    ended = BodyEnded(raised, shortage, text, *sampler.last(), changes, context_bytes)
    channel.send_with_value(ended, data)


def _give_up(channel: Channel, sampler: LiveSampler, fault: str) -> None:
    """End this process, whose body may hang in the driver, with an error that names the fault."""
    text = (
        f"{FAILED}: {fault}. The body had not ended {GRACE_S:g} s later, so the process was ended."
    )
    try:
        ended = BodyEnded(True, None, text, *sampler.last())
        channel.send_with_value(ended, values.dump_exception(RuntimeError(text)))
    finally:
        # Also if the body has closed the channel: the process would hang for good.
        os._exit(1)


class MpsClient:
    """Looks at the context of a client of MPS while the body runs, so that no client hangs after another one's fault.

    After a failed assertion of this client it ends the server, once: the kernels of other clients may otherwise hang for good
    (`mps.ASSERTION`). All clients of an ended server get an error, and run again outside MPS. In some of them the driver
    waits for ever instead: `give_up` is called if the body has not ended `GRACE_S` seconds after a fault of its context.
    """

    def __init__(
        self,
        pipes: str,
        give_up: Callable[[str], None],
        fault: Callable[[int | None], str] = context_fault,
        end: Callable[[str], None] = mps.end_servers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pipes, self._give_up, self._fault, self._clock = pipes, give_up, fault, clock
        #: `end` until one of two threads has taken it: to take from a list is atomic.
        self._ends = [end]
        self._due_s = float("-inf")
        #: Seconds of the clock at the first fault, and whether the body is over.
        self._fault_s, self._over = float("inf"), False

    def look(self) -> None:
        """Look at the context, at most every `WATCH_S` seconds: a body may notice its fault late, or never."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + WATCH_S
        fault = self._fault(PER_THREAD)
        self._end_after(fault)
        if mps.is_fault(fault):
            self._fault_s = min(self._fault_s, now_s)
            if now_s >= self._fault_s + GRACE_S and not self._over:
                self._give_up(fault)

    def finish(self, fault: str) -> None:
        """The body is over, with this fault of its context: its rollbacks may take longer than `GRACE_S`."""
        self._over = True
        self._end_after(fault)

    def _end_after(self, fault: str) -> None:
        """End the server if the fault is an assertion."""
        if fault != mps.ASSERTION:
            return
        try:
            end = self._ends.pop()
        except IndexError:
            return
        end(self._pipes)


def _end_others(client: MpsClient | None) -> str:
    """Return the fault that ended the device's context, "": none; see `MpsClient`."""
    fault = context_fault()
    if client is not None:
        client.finish(fault)
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

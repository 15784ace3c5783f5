"""However a flow ends, the processes of its GPU tasks end with it, and the API shows it."""

from __future__ import annotations

import signal
import subprocess
import time
from uuid import UUID

import pytest
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun

from tests.integration import engine_api as api
from tests.integration.kill_flow import (
    CHILDREN,
    SLEEPERS,
    Running,
    kill_flow,
    read_pids,
    start_sleepers,
)
from tests.integration.programs import SCRIPT, Workplace, wait_for

#: Seconds in which children end: far below what the tasks would take by themselves, so that one which
#: was not ended fails the test. How fast it is, is printed, not asserted: up to a second of it is Prefect's,
#: which joins the thread of its heartbeat before it leaves the runner.
CHILDREN_S = 120.0

#: Seconds in which the flow's own process ends: its last states and reports still go to the API.
PROCESS_S = 180.0

#: Artifacts that wait for a file, so that the flow run is Completed before they are published.
SLOW_ARTIFACTS = """
import os
import time
from prefect.client.orchestration import SyncPrefectClient

create_artifact = SyncPrefectClient.create_artifact

def create_late(self, artifact):
    while not os.path.exists("publish"):
        time.sleep(0.05)
    return create_artifact(self, artifact)

SyncPrefectClient.create_artifact = create_late
"""


def read_run(client: SyncPrefectClient, name: str) -> FlowRun:
    (run,) = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name]))
    )
    return run


def flow_state(name: str) -> str:
    with get_client(sync_client=True) as client:
        state = read_run(client, name).state_type
    return state.value if state else ""


def task_states(name: str) -> list[str]:
    with get_client(sync_client=True) as client:
        run = read_run(client, name)
        tasks = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
        )
    return sorted(t.state_type.value if t.state_type else "" for t in tasks)


def wait_for_states(name: str, flow: set[str], tasks: set[str], count: int) -> None:
    # Task-run states reach the API seconds late.
    def arrived() -> bool:
        seen = task_states(name)
        return flow_state(name) in flow and len(seen) == count and set(seen) <= tasks

    wait_for(
        arrived,
        explain=lambda: f"flow {flow_state(name)}, tasks {task_states(name)}",
        interval_s=0.5,
    )


def test_kill_9_leaves_nothing(place: Workplace) -> None:
    running, seconds = kill_flow(place)
    print(f"kill -9 of a flow with {CHILDREN} tasks: none left after {seconds:.2f} s")
    assert sorted(running.pids.values()) == ["child"] * CHILDREN + ["helper", "session"]


@pytest.mark.parametrize(
    ("end", "state", "why"),
    [
        ("wait", "CRASHED", "aborted by a termination signal"),
        ("cancel", "CANCELLED", "the flow run was cancelled"),
    ],
    ids=["SIGTERM", "cancelled through the API"],
)
def test_a_signal_to_the_flow_ends_its_children(
    place: Workplace, end: str, state: str, why: str
) -> None:
    name = f"signalled-{place.token}"
    running = start_sleepers(place, 3, name, end)
    began = time.monotonic()
    running.process.terminate()
    seconds = running.wait_until_none_left(began, PROCESS_S)
    _, errors = running.process.communicate(timeout=PROCESS_S)
    print(f"SIGTERM: children {seconds:.2f} s, process {time.monotonic() - began:.2f} s")
    assert running.process.returncode != 0
    check_end(name, errors, seconds, state, why)


def check_end(name: str, errors: str, seconds: float, state: str, why: str) -> None:
    """Check what a flow run with three tasks, which a signal has ended, has logged and what the API shows of it."""
    assert seconds < CHILDREN_S, errors
    assert "| Task run" in errors and "ERROR   | Task run" not in errors
    wait_for_states(name, {state}, {state}, 3)
    with get_client(sync_client=True) as client:
        flow_run_id = read_run(client, name).id
    # One for each process, and one of the flow run.
    said = [str(each.data) for each in api.artifacts(flow_run_id=flow_run_id, count=4)]
    assert all(why in each for each in said), said[0][:600]


@pytest.mark.parametrize(
    "signum",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_signal_after_the_flow_has_completed_loses_no_report(
    place: Workplace, signum: int
) -> None:
    place.write("script.py", SLOW_ARTIFACTS + SCRIPT)
    process = place.start("-u", "script.py")
    assert process.stdout is not None
    run_id = UUID(process.stdout.readline().split()[1])
    with get_client(sync_client=True) as client:

        def completed() -> bool:
            return client.read_flow_run(run_id).state_name == "Completed"

        wait_for(completed, interval_s=0.1)
    assert process.poll() is None, "it publishes reports"
    process.send_signal(signum)
    place.write("publish", "")
    _, errors = process.communicate(timeout=PROCESS_S)
    print(errors)
    # One for each process, and one of the flow run.
    assert len(api.artifacts(flow_run_id=run_id, count=3)) == 3


def test_ctrl_c_at_a_terminal(place: Workplace) -> None:
    place.write("sleepers.py", SLEEPERS)
    place.environment["PREFECT_LOGGING_COLORS"] = "false"
    # A terminal of its own; Ctrl-C is typed once all sleep.
    place.write(
        "terminal.py",
        """
import os, pty, select, sys, time
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.executable, [sys.executable, "sleepers.py", *sys.argv[1:]])
typed, shown = False, open("shown.txt", "wb", buffering=0)
while True:
    if select.select([terminal], [], [], 0.05)[0]:
        try:
            text = os.read(terminal, 65536)
        except OSError:
            break
        if not text:
            break
        shown.write(text)
    if not typed and os.path.exists("type-now"):
        os.write(terminal, b"\\x03")
        typed = True
sys.exit(0 if os.waitpid(pid, 0)[1] else 9)
""",
    )
    name = f"typed-{place.token}"
    process = place.start("terminal.py", "3", "wait", name, stdout=subprocess.DEVNULL)
    pids = read_pids(place, 5, process)
    began = time.monotonic()
    place.write("type-now", "")
    seconds = Running(process, pids).wait_until_none_left(began, PROCESS_S)
    process.communicate(timeout=PROCESS_S)
    print(f"Ctrl-C: children {seconds:.2f} s, process {time.monotonic() - began:.2f} s")
    assert process.returncode == 0
    shown = (place.folder / "shown.txt").read_text(errors="replace")
    check_end(name, shown, seconds, "CRASHED", "aborted by an interrupt signal")


def test_a_flow_that_raises_ends_its_children(place: Workplace) -> None:
    name = f"raised-{place.token}"
    running = start_sleepers(place, 3, name, end="raise")
    # The flow raises within a hundredth of a second of the last child's note.
    seconds = running.wait_until_none_left(time.monotonic(), PROCESS_S)
    _, errors = running.process.communicate(timeout=PROCESS_S)
    print(f"a flow that raises: children {seconds:.2f} s")
    assert running.process.returncode == 1
    assert "the flow ends here" in errors
    assert seconds < CHILDREN_S
    wait_for_states(name, {"FAILED"}, {"CANCELLED"}, 3)


def test_a_parent_that_exits_at_once_ends_its_children(place: Workplace) -> None:
    running = start_sleepers(place, 3, f"exited-{place.token}", end="exit")
    seconds = running.wait_until_none_left(time.monotonic(), PROCESS_S)
    running.process.communicate(timeout=PROCESS_S)
    print(f"os._exit: children {seconds:.2f} s")
    assert running.process.returncode == 7
    assert seconds < CHILDREN_S

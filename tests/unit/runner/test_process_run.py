"""How the process of a task ends, whatever comes first: each row of the table, and any order of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.errors import BudgetExceededError, ProtocolError
from prefect_gpu.frameworks import out_of_memory
from prefect_gpu.processes.launch_spec import ChildExited, ChildRefused, ValueArrived
from prefect_gpu.processes.messages import Asked, BodyEnded, EventEmitted, LogEmitted
from prefect_gpu.runner.process_run import (
    IGNORED,
    TRANSITIONS,
    AwaitsReturn,
    BodyBegan,
    Cancelled,
    Died,
    Done,
    EndedForOthers,
    Failed,
    Finish,
    IllegalTransition,
    Kill,
    Lost,
    OpenValue,
    OutOfMemory,
    Phase,
    ProcessRun,
    Quit,
    Resumed,
    RunMessage,
    SetDeadline,
    ShowAwaiting,
    ShowRunning,
    Suspended,
    TimedOut,
    Warn,
    outcome_of,
)

OVER = OutOfMemory(BudgetExceededError("task", 6, 8))
DEATH = Died(ChildExited(-9, ""), "unknown")
BROKEN = Failed(ProtocolError("no message"))
ENDED = BodyEnded(False)
VALUE = ValueArrived(b"")
COMES = OpenValue(ENDED, b"")
LOG, EVENT, QUESTION = LogEmitted({}), EventEmitted("{}"), Asked("attribute", {})

#: One message of each kind.
MESSAGES: dict[str, RunMessage] = {
    "log": LOG,
    "event": EVENT,
    "asked": QUESTION,
    "suspended": Suspended(1.0),
    "resumed": Resumed(2.0),
    "awaits": AwaitsReturn("room"),
    "began": BodyBegan(0.0),
    "ended": ENDED,
    "value": VALUE,
    "failed": BROKEN,
    "over": OVER,
    "timeout": TimedOut(),
    "cancelled": Cancelled(),
    "others": EndedForOthers("device 0"),
    "lost": Lost("gone"),
    "refused": ChildRefused(OSError("no process")),
    "died": DEATH,
}

#: How a process comes into each phase.
PATHS: dict[Phase, list[RunMessage]] = {
    Phase.STARTING: [],
    Phase.RUNNING: [BodyBegan(0.0)],
    Phase.SENDING: [BodyBegan(0.0), ENDED],
    Phase.KILLED: [Cancelled()],
    Phase.LOST: [Lost("gone")],
    Phase.LOST_SENDING: [Lost("gone"), ENDED],
    Phase.FINISHED: [DEATH],
}

STAYS, ILLEGAL, IGNORES = "=", "!", "."
#: The next phase by its first letters (LS: LOST_SENDING, V: FINISHED with a value).
TABLE = """
             log event asked suspended resumed awaits began ended value failed over timeout cancelled others lost refused died
STARTING     =   =     =     =         =       =      R     S     .     K      K    !       K         K      L    F       F
RUNNING      =   =     =     =         =       =      !     S     .     K      K    K       K         K      L    F       F
SENDING      =   =     =     =         =       =      !     !     V     K      K    !       K         .      LS   F       F
KILLED       =   =     =     .         .       .      .     .     .     .      .    !       =         .      .    F       F
LOST         =   =     =     .         .       .      .     LS    .     .      .    !       K         .      .    F       F
LOST_SENDING =   =     =     .         .       .      .     !     V     .      .    !       K         .      .    F       F
FINISHED     !   !     !     !         !       !      !     !     !     !      !    !       !         !      !    !       !
"""
LETTERS = {"R": Phase.RUNNING, "S": Phase.SENDING, "V": Phase.FINISHED, "K": Phase.KILLED}
LETTERS |= {"L": Phase.LOST, "LS": Phase.LOST_SENDING, "F": Phase.FINISHED}
NAMES, *ROWS = (line.split() for line in TABLE.strip().splitlines())
CELLS = [
    (Phase[row[0]], name, cell) for row in ROWS for name, cell in zip(NAMES, row[1:], strict=True)
]


def run_in(phase: Phase, timeout_s: float | None = None, enforces: bool = True) -> ProcessRun:
    run = ProcessRun(timeout_s, enforces)
    for message in PATHS[phase]:
        run.handle(message)
    assert run.phase is phase
    return run


@pytest.mark.parametrize(("phase", "name", "cell"), CELLS)
def test_each_pair_of_phase_and_message_is_in_the_table(phase: Phase, name: str, cell: str) -> None:
    run, message = run_in(phase), MESSAGES[name]
    if cell == ILLEGAL:
        with pytest.raises(IllegalTransition, match=type(message).__name__):
            run.handle(message)
    elif cell == IGNORES:
        assert run.handle(message) == []
    else:
        actions = run.handle(message)
        finishes = [action for action in actions if isinstance(action, Finish)]
        assert bool(finishes) is (cell == "F")
        assert any(isinstance(action, OpenValue) for action in actions) is (cell == "V")
    assert run.phase is LETTERS.get(cell, phase)


def test_the_table_has_no_pair_twice_and_no_other_message() -> None:
    kinds = {type(message) for message in MESSAGES.values()}
    for phase in Phase:
        assert not TRANSITIONS[phase].keys() & IGNORED[phase]
        assert TRANSITIONS[phase].keys() | IGNORED[phase] <= kinds


@pytest.mark.parametrize(
    ("messages", "outcome"),
    [
        pytest.param([DEATH], DEATH, id="a process that ends by itself has died"),
        pytest.param([ENDED, DEATH], DEATH, id="also while it sends its value"),
        pytest.param([ENDED, VALUE], COMES, id="the body of a call that returns at once"),
        pytest.param([BROKEN, DEATH], BROKEN, id="bytes that are no message"),
        pytest.param([Cancelled(), ENDED, VALUE, DEATH], Cancelled(), id="a value after the kill"),
        pytest.param([EndedForOthers("0"), DEATH], EndedForOthers("0"), id="ended for others"),
        pytest.param([EndedForOthers("0"), Cancelled(), DEATH], Cancelled(), id="cancelled as well"),
        pytest.param([Cancelled(), EndedForOthers("0"), DEATH], Cancelled(), id="cancelled before"),
        pytest.param([Cancelled(), Lost("gone"), DEATH], Cancelled(), id="a killed process answers no driver"),
        pytest.param([OVER, DEATH], OVER, id="above its budget"),
        pytest.param([ENDED, OVER, VALUE, DEATH], OVER, id="above its budget before its value"),
        pytest.param([Lost("gone"), DEATH], Lost("gone"), id="lost"),
        pytest.param([Lost("gone"), ENDED, DEATH], Lost("gone"), id="lost, and its value with it"),
        pytest.param([ENDED, Lost("gone"), DEATH], Lost("gone"), id="lost while it sent its value"),
        pytest.param([Lost("gone"), ENDED, VALUE], COMES, id="lost after its body had ended"),
        pytest.param([ENDED, Lost("gone"), VALUE], COMES, id="lost before its value had come"),
        pytest.param([Lost("gone"), Cancelled(), DEATH], Cancelled(), id="lost, then cancelled"),
        pytest.param([ENDED, EndedForOthers("0"), VALUE], COMES, id="a value that is about to come"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("began", [True, False])
def test_how_a_process_ended(messages: list[RunMessage], outcome: object, began: bool) -> None:
    run = run_in(Phase.RUNNING if began else Phase.STARTING)
    done = [action for message in messages for action in run.handle(message)]
    if outcome == Lost("gone"):
        assert Kill(bars_moves=True) in done
    assert done[-1] == (outcome if outcome is COMES else Finish(outcome))  # type: ignore[arg-type]


def opened(value: object, **said: Any) -> object:
    """Return the outcome of a body that has raised a value."""
    return outcome_of(BodyEnded(True, traceback="tb", **said), value)


def test_what_a_body_has_raised_decides_the_outcome() -> None:
    error, leave = ValueError("no"), SystemExit(3)
    assert outcome_of(ENDED, 7) == Done(7)
    assert opened(error) == Failed(error, "tb")
    shortage = out_of_memory.OutOfMemory("torch")
    assert opened(error, out_of_memory=shortage) == OutOfMemory(error, "tb")
    assert opened(leave) == Quit(leave, "tb")
    failed = opened("text")
    assert isinstance(failed, Failed) and isinstance(failed.error, ProtocolError)


def test_a_process_that_cannot_be_started_is_refused_unless_it_was_cancelled() -> None:
    refused = ChildRefused(OSError("no process"))
    assert ProcessRun(None, True).handle(refused) == [Finish(refused)]
    assert run_in(Phase.KILLED).handle(refused) == [Finish(Cancelled())]


def test_a_process_above_its_budget_is_warned_of_unless_it_is_to_be_killed() -> None:
    run = run_in(Phase.RUNNING, enforces=False)
    (warning,) = run.handle(OVER)
    assert isinstance(warning, Warn) and warning.text.endswith("gpu:enforce=kill would end it")
    assert run.phase is Phase.RUNNING
    assert run_in(Phase.RUNNING).handle(OVER) == [Kill()]


def test_a_suspension_is_shown() -> None:
    run = run_in(Phase.RUNNING)
    assert run.handle(Suspended(1.0)) == []
    assert run.handle(AwaitsReturn("room")) == [ShowAwaiting("room")]
    assert run.handle(Resumed(2.0)) == [ShowRunning()]


def deadlines(*messages: RunMessage) -> list[float | None]:
    run = ProcessRun(10.0, True)
    done = [action for message in messages for action in run.handle(message)]
    return [action.at_s for action in done if isinstance(action, SetDeadline)]


def test_time_counts_from_the_bodys_first_line_and_not_while_the_process_is_suspended() -> None:
    assert deadlines(BodyBegan(5.0)) == [15.0]
    assert deadlines(BodyBegan(5.0), Suspended(9.0), Resumed(100.0)) == [15.0, None, 106.0]
    # A body that begins while its process is suspended has its time after that.
    assert deadlines(Suspended(4.0), BodyBegan(4.0), Resumed(100.0)) == [110.0]
    assert deadlines(Suspended(4.0), Resumed(5.0), BodyBegan(6.0)) == [16.0]


@pytest.mark.parametrize("last", [ENDED, Cancelled(), OVER, Lost("gone"), DEATH, BROKEN])
def test_a_body_that_has_ended_or_is_killed_has_no_deadline_again(last: RunMessage) -> None:
    assert deadlines(BodyBegan(5.0), last) == [15.0, None]
    if last == ENDED:
        assert deadlines(BodyBegan(5.0), Suspended(6.0), last, Resumed(7.0)) == [15.0, None]


def test_a_body_without_a_limit_has_no_deadline() -> None:
    run = ProcessRun(None, True)
    messages = (BodyBegan(5.0), Suspended(6.0), Resumed(7.0))
    assert [a for m in messages for a in run.handle(m)] == [ShowRunning(), ShowRunning()]


#: What a child may send, in this order; it may end after each.
SAID: list[RunMessage] = [BodyBegan(0.0), ENDED, VALUE]
ANYWHERE = [LOG, EVENT, QUESTION]
FROM_OUTSIDE: list[Callable[[], RunMessage]] = [
    Cancelled,
    lambda: OVER,
    lambda: EndedForOthers("device 0"),
    lambda: Lost("gone"),
    lambda: Suspended(1.0),
    lambda: Resumed(2.0),
    lambda: AwaitsReturn("room"),
]


@st.composite
def histories(draw: st.DrawFn) -> list[RunMessage]:
    said = SAID[draw(st.integers(0, 1)) : draw(st.integers(0, 3))]
    said = said if ENDED in said else [message for message in said if message is not VALUE]
    if draw(st.booleans()):
        said.append(BROKEN)
    others = [make() for make in draw(st.lists(st.sampled_from(FROM_OUTSIDE), max_size=6))]
    others += draw(st.lists(st.sampled_from(ANYWHERE), max_size=3))
    for message in others:
        said.insert(draw(st.integers(0, len(said))), message)
    return [*said, DEATH]


@given(histories(), st.booleans(), st.data())
def test_any_order_of_messages_ends_in_one_outcome(
    history: list[RunMessage], enforces: bool, data: st.DataObject
) -> None:
    run, inbox = ProcessRun(10.0, enforces), list(history)
    finished: list[Finish | OpenValue] = []
    deadline, suspended, killed = None, False, False
    while not finished:
        message: RunMessage = inbox.pop(0)
        if deadline is not None and data.draw(st.booleans()):
            inbox.insert(0, message)
            message = TimedOut()
        suspended = {Suspended: True, Resumed: False}.get(type(message), suspended)
        for action in run.handle(message):
            assert not finished, "nothing follows"
            match action:
                case SetDeadline(at_s):
                    deadline = at_s
                case Kill():
                    killed = True
                case ShowRunning() | ShowAwaiting():
                    assert not killed
                case Finish() | OpenValue():
                    finished.append(action)
        assert deadline is None or (run.phase is Phase.RUNNING and not suspended)
    assert len(finished) == 1
    before_value = history[: history.index(VALUE)] if VALUE in history else history
    if Cancelled() in before_value:
        assert finished == [Finish(Cancelled())]
    elif VALUE not in history:
        assert isinstance(finished[0], Finish)
    with pytest.raises(IllegalTransition):
        run.handle(data.draw(st.sampled_from(list(MESSAGES.values()))))

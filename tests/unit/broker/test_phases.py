"""The phases of a request: each pair of phase and trigger is in the table here, or raises."""

from __future__ import annotations

import pytest

from prefect_gpu.broker.phases import IllegalTransition, Phase, Trigger, next_phase

#: Next phases by trigger, in the order of `Phase`: `.` the same one, `!` illegal.
TABLE = """
             OPEN    WAITING PLACED  RUNNING LEAVING AWAY      RELEASED RETURNING ENDING GONE
ADMITTED     WAITING !       !       !       !       !         !        !         !      !
PLACED       !       PLACED  !       !       !       !         AWAY     !         !      !
REJECTED     GONE    GONE    !       !       !       !         .        !         !      !
WITHDRAWN    GONE    GONE    GONE    !       !       !         !        !         .      .
STARTED      !       !       RUNNING .       !       !         !        !         .      .
ENDED        .       .       GONE    ENDING  ENDING  ENDING    ENDING   ENDING    .      .
RECOVERED    !       !       !       !       !       !         !        !         GONE   !
NOT_MOVED    !       !       !       .       RUNNING !         !        !         .      .
MOVING_OUT   !       !       !       LEAVING .       !         !        !         .      .
MOVED_OUT    !       !       !       !       AWAY    .         .        AWAY      .      .
RELEASED     !       !       !       !       !       RELEASED  !        !         .      .
MOVING_IN    !       !       !       !       !       RETURNING !        !         .      .
MOVED_IN     !       !       !       !       !       !         !        RUNNING   .      .
"""
NAMES, *ROWS = (line.split() for line in TABLE.strip().splitlines())
CELLS = [
    (Phase[name], Trigger[row[0]], cell)
    for row in ROWS
    for name, cell in zip(NAMES, row[1:], strict=True)
]


def test_the_table_here_has_all_phases_and_triggers() -> None:
    assert len(CELLS) == len(Phase) * len(Trigger)


@pytest.mark.parametrize(("phase", "trigger", "cell"), CELLS)
def test_each_pair_leads_to_a_phase_or_raises(phase: Phase, trigger: Trigger, cell: str) -> None:
    if cell == "!":
        with pytest.raises(IllegalTransition, match=f"'{trigger.value}' came when {phase.value}"):
            next_phase(phase, trigger)
    else:
        assert next_phase(phase, trigger) is (phase if cell == "." else Phase[cell])


def test_an_illegal_transition_shows_the_last_triggers_of_its_request() -> None:
    with pytest.raises(IllegalTransition, match=r"before: placed, started$"):
        next_phase(Phase.RUNNING, Trigger.PLACED, [Trigger.PLACED, Trigger.STARTED])

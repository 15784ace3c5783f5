"""A flow in a terminal: its live view, and the text of the flow and of its tasks' processes above it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.fakes.terminal import Terminal

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

#: Seconds after which a flow will never end.
PATIENCE_S = 300

FLOW = """
import time
from prefect import flow, get_run_logger, task
from prefect_gpu import GPUTaskRunner, gpu, step
from prefect_gpu.testing import allocate

@task(tags=gpu(memory="10GiB"))
def evaluate(number):
    with allocate("3GiB"):
        for at in range(12):
            time.sleep(0.15)
            step()
            if at % 6 == 0:
                print(f"[child {number} at {at} " + "x" * 120 + "]", flush=True)
                get_run_logger().info(f"[logged {number} at {at} " + "y" * 90 + "]")
    return number

@flow(task_runner=GPUTaskRunner(devices="simulated:1x24GiB", standby=0))
def main():
    runs = [evaluate.with_options(task_run_name=f"run-{n}").submit(n) for n in range(4)]
    for line in range(20):
        time.sleep(0.1)
        print(f"[flow {line} " + "z" * 110 + "]")
    DISPLAY
    for run in runs:
        run.result()
    print("[the flow is over]")

main()
"""

#: A progress bar of the flow's own, on the same terminal.
BAR = """
    from rich.progress import Progress
    with Progress() as bar:
        mine = bar.add_task("bar of the user", total=len(runs))
        for run in runs:
            run.result()
            bar.advance(mine)
"""


def run_flow(terminal: Terminal, folder: Path, api_url: str, display: str, **settings: str) -> None:
    script = folder / "flow.py"
    script.write_text(FLOW.replace("    DISPLAY", display), encoding="utf-8")
    environment = {
        **os.environ,
        "PREFECT_API_URL": api_url,
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm-256color",
        **settings,
    }
    flow = terminal.start([sys.executable, str(script)], env=environment)
    try:
        assert flow.wait(PATIENCE_S) == 0, terminal.text
    finally:
        flow.kill()
        flow.wait()
        terminal.close()


def check_lines(screen: list[str]) -> None:
    """Check that each line of the flow and of its processes is there once and whole."""
    text = "".join(line.ljust(100) for line in screen)
    expected = [f"[flow {line} {'z' * 110}]" for line in range(20)]
    for number in range(4):
        for at in (0, 6):
            expected += [
                f"[child {number} at {at} {'x' * 120}]",
                f"[logged {number} at {at} {'y' * 90}]",
            ]
    for line in expected:
        assert text.count(line) == 1, (line, "\n".join(screen))
    assert "[the flow is over]" in screen


def test_a_terminal_shows_the_flow_and_every_line_stays_whole(
    prefect_server: str, tmp_path: Path
) -> None:
    terminal = Terminal(columns=100)
    run_flow(terminal, tmp_path, prefect_server, "")
    written = terminal.text
    assert re.search(
        r"GPU task runs: \d of 4 ended, [12] running, \d waiting for a device", written
    )
    assert re.search(r"^0 +simulated 24GiB +24GiB +6GiB +20GiB +3\.8GiB", written, re.MULTILINE)
    assert re.search(r"^run-0 +0 +3GiB +10GiB +\d+s +\d+ \(1\d\dms each\)", written, re.MULTILINE)
    assert re.search(r"^run-2 +\d+s +10GiB on ", written, re.MULTILINE)
    screen = terminal.screen()
    check_lines(screen)
    assert not any(line.startswith(("GPU task runs", "index ", "running ")) for line in screen)


@pytest.mark.parametrize(
    ("display", "settings"),
    [(BAR, {}), ("", {"PREFECT_INTEGRATIONS_GPU_LIVE_VIEW": "off"})],
    ids=["a bar of the user's own", "it is switched off"],
)
def test_another_display_or_the_setting_ends_the_view(
    prefect_server: str, tmp_path: Path, display: str, settings: dict[str, str]
) -> None:
    terminal = Terminal(columns=100)
    run_flow(terminal, tmp_path, prefect_server, display, **settings)
    before, bar, after = terminal.text.partition("bar of the user")
    assert bool(bar) == bool(display)
    assert "running " not in (after if display else before)
    assert bool(re.search(r"\n(\x1b\[[0-9;]*m)*GPU task runs: \d of 4 ended", before)) == bool(bar)
    # Nothing of it is left, and the cursor is seen.
    assert after.rfind("\x1b[?25h") >= after.rfind("\x1b[?25l")

"""Which line of the user's a crashed process was at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from prefect_gpu import in_task
from prefect_gpu.processes.crash_site import crashed_at

CRASH = """
import faulthandler, os, signal, threading
faulthandler.enable()
threading.Thread(target=threading.Event().wait, daemon=True).start()
def train():
    {how}
train()
"""


def crash(folder: Path, how: str) -> str:
    script = folder / "script.py"
    script.write_text(CRASH.format(how=how))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode < 0
    return done.stderr


def test_it_is_the_innermost_line_of_the_users(tmp_path: Path) -> None:
    said = crash(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)")
    assert crashed_at(said) == f"train ({tmp_path}/script.py:6)"


def test_frames_of_libraries_are_left_out_unless_there_are_no_others() -> None:
    library = '  File "/x/site-packages/torch/nn/functional.py", line 9 in linear\n'
    ours = f'  File "{Path(in_task.__file__)}", line 3 in run\n'
    users = '  File "/home/ada/train.py", line 12 in train\n'
    head = "Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n"
    assert crashed_at(head + library + users + ours) == "train (/home/ada/train.py:12)"
    assert crashed_at(head + library) == "linear (/x/site-packages/torch/nn/functional.py:9)"


def test_where_nothing_is_known_nothing_is_said() -> None:
    assert crashed_at("") == crashed_at("Killed") == ""

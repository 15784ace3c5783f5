"""Count the modules of the package that one submitted task passes, and the threads of the flow's process.

    python tests/count_modules.py

A module counts if one of its functions is called between `submit` and the task's final state, in the flow's process
or in the task's, and a thread if it calls one. Calls while a module is imported do not count. It prints the modules and
the threads, their numbers last, and exits with 1 if they are too many. The task is tagged, runs on a simulated device,
and its process starts afresh.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

#: Most modules that one submit may pass.
MOST = 40

#: Most threads of the flow's process that may be handed the task, after that of `submit`.
MOST_HOPS = 4

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(ROOT / "prefect_gpu") + os.sep

#: Names the file that every process appends to; set for children only.
VARIABLE = "COUNT_MODULES_FILE"


class Tracer:
    """Writes down each module at the first call of one of its functions by each thread.

    Args:
        file: Gets one line for each: monotonic seconds, "parent" or "child", the module, the thread's name.
        process: "parent" or "child".
    """

    def __init__(self, file: str, process: str) -> None:
        # Appended at once: a child ends without a last word.
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._process = process
        self._seen: set[tuple[str, str]] = set()

    def start(self) -> None:
        """Trace this thread, and those that it starts."""
        threading.setprofile(self._trace)
        sys.setprofile(self._trace)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        # A dataclass's own methods have no file: they count as the module of the class.
        module = (
            frame.f_globals.get("__name__", "")
            if frame.f_code.co_filename.startswith(PACKAGE)
            else ""
        )
        if not module.startswith("prefect_gpu"):
            return
        call = (module, _name_of_thread())
        if call in self._seen:
            return
        # Bodies of modules and classes are no functions.
        if not frame.f_code.co_flags & 0x1 or _is_imported(frame):
            return
        self._seen.add(call)
        line = " ".join((str(time.monotonic()), self._process, *call))
        os.write(self._descriptor, f"{line}\n".encode())


def _name_of_thread() -> str:
    # `threading.current_thread` would make an object for a thread that is just starting.
    thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return "starting" if thread is None else thread.name


def _is_imported(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def trace_child() -> None:
    """Trace this process if it is a child. Called as an interpreter starts, by `sitecustomize`."""
    file = os.environ.get(VARIABLE)
    if file:
        Tracer(file, "child").start()


def run_task(file: str, folder: str) -> float:
    """Run one task, traced; return the monotonic seconds of its final state."""
    from prefect import flow, task

    from prefect_gpu import GPUTaskRunner, gpu

    @task(tags=gpu(memory="1GiB", framework="torch"))
    def add(a: int, b: int) -> int:
        return a + b

    @flow(task_runner=GPUTaskRunner(devices="simulated:1x24GiB", standby=0))
    def one() -> float:
        path = os.pathsep.join((folder, str(ROOT), os.environ.get("PYTHONPATH", "")))
        os.environ.update({VARIABLE: file, "PYTHONPATH": path})
        Tracer(file, "parent").start()
        future = add.submit(1, 2)
        future.wait()
        ended_s = time.monotonic()
        sys.setprofile(None)
        threading.setprofile(None)
        assert future.result() == 3
        return ended_s

    return one()


def measure() -> list[list[str]]:
    """Run one task; return process, module and thread of each line, in order of their first calls."""
    from prefect.testing.utilities import prefect_test_harness

    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "sitecustomize.py"
        site.write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
            "import count_modules\ndel sys.path[0]\ncount_modules.trace_child()\n"
        )
        file = str(Path(folder) / "modules")
        with prefect_test_harness(server_startup_timeout=300):
            ended_s = run_task(file, folder)
        lines = (line.split(" ", 3) for line in Path(file).read_text().splitlines())
        return [found for at_s, *found in lines if float(at_s) <= ended_s]


def main() -> int:
    """Print the modules, the threads and their numbers; return 1 if there are too many."""
    passed = measure()
    by_process = {
        process: {module for where, module, _ in passed if where == process}
        for process in ("parent", "child")
    }
    modules = sorted(set().union(*by_process.values()))
    for module in modules:
        where = " and ".join(p for p, found in by_process.items() if module in found)
        print(f"{module:45} {where}")
    threads = [*dict.fromkeys(thread for where, _, thread in passed if where == "parent")]
    for thread in threads:
        print(f"{thread:45} thread")
    count, hops = sum(1 for _ in ROOT.glob("prefect_gpu/**/*.py")), len(threads) - 1
    print(f"one submit passes {len(modules)} of {count} modules; at most {MOST} are wanted")
    print(f"its task is handed to {hops} other threads; at most {MOST_HOPS} are wanted")
    return int(len(modules) > MOST or hops > MOST_HOPS)


if __name__ == "__main__":
    # Not as `__main__`, which the functions of a flow would be found in by a child.
    sys.exit(
        subprocess.run(
            [sys.executable, "-c", "import sys, count_modules; sys.exit(count_modules.main())"],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    (str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", ""))
                ),
            },
        ).returncode
    )

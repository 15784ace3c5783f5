"""A ledger that is lost while flows use it: they go on, and say so once."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.integration.programs import LIMIT_S, Workplace, wait_for

FLOW = """
import sys
import time
from pathlib import Path

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu


@task(tags=gpu(memory="600MiB", framework="none"))
def say(number):
    if number == 0:
        Path("begun").touch()
        while not Path("go on").exists():
            time.sleep(0.02)
    return number


@flow(task_runner=GPUTaskRunner(devices=sys.argv[1], reports=False, start_method="auto"))
def ask():
    return [future.result() for future in [say.submit(number) for number in range(3)]]


print("ENDS", ask())
"""


def test_a_flow_goes_on_without_the_folder_of_its_ledger_and_of_its_simulated_devices(
    place: Workplace,
) -> None:
    place.write("ask.py", FLOW)
    process = place.start("ask.py", "simulated:1x1GiB@lost")
    begun = place.folder / "begun"
    wait_for(lambda: begun.exists() or process.poll() is not None)
    assert begun.exists(), process.communicate()
    # In one step: the flow makes files again in a folder that is emptied file by file.
    gone = Path(place.environment["PREFECT_INTEGRATIONS_GPU_LEDGER"]).rename(place.folder / "gone")
    shutil.rmtree(gone)
    (place.folder / "go on").touch()
    out, errors = process.communicate(timeout=LIMIT_S)
    assert "ENDS [0, 1, 2]" in out, f"{out}\n{errors}"
    assert process.returncode == 0
    assert errors.count("GPU tasks of other processes are not seen from now on") == 1, errors
    assert "memory of other flows on simulated devices @lost is not seen" in errors
    assert "Traceback" not in errors

"""Names of tasks, task runs and flows that are long, or have characters that cannot be shown."""

from __future__ import annotations

import json

import httpx

from tests.integration.programs import Workplace

PROGRAM = """
import json

from prefect import flow, task
from prefect.runtime import flow_run

from prefect_gpu import GPUTaskRunner, gpu

NAMES = {
    "NUL": "a\\x00b",
    "long": "x" * 200_000,
    "surrogate": "a\\ud800b",
    "reversed": "a\\u202eb",
}


def body():
    return 1


def named(name, run_name):
    return task(body, name=name, task_run_name=run_name, tags=gpu(memory="64MiB", framework="none"))


# Prefect sends the flow's name in a header of each request; its server takes 64 KiB of headers.
@flow(name="flow \\u202e" + "y" * 10_000, task_runner=GPUTaskRunner(devices="host"))
def names():
    # Prefect's API refuses NUL and lone surrogates in the name of a run, for tasks of any runner.
    futures = [named(name, f"run {at}").submit() for at, name in enumerate(NAMES.values())]
    futures += [named("t", f"run {NAMES[key]}").submit() for key in ("long", "reversed")]
    states = [(future.wait() or future.state).name for future in futures]
    print("FOUND", json.dumps({"flow_run": str(flow_run.id), "states": states}))


names()
"""


def test_reports_of_odd_names_are_published_short_and_in_the_direction_of_the_text(
    place: Workplace, prefect_server: str
) -> None:
    place.write("names.py", PROGRAM)
    done = place.run("names.py")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert found["states"] == ["Completed"] * 6
    answer = httpx.post(
        f"{prefect_server}/artifacts/filter",
        json={"flow_runs": {"id": {"any_": [found["flow_run"]]}}},
        timeout=60,
    )
    artifacts = answer.raise_for_status().json()
    reports = [a["data"] for a in artifacts if a["key"].startswith(("gpu-memory", "gpu-flow"))]
    assert len(reports) == 6 + 1
    for each in reports:
        assert "\u202e" not in each
        assert len(each) < 50_000

"""What tasks print reaches the flow's own output, whatever becomes of its stream or its thread."""

from __future__ import annotations

from tests.integration.programs import Workplace

PROGRAM = """
import os
import threading

from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu

start = threading.Thread.start


def refuse(thread):
    if thread.name.endswith("output"):
        raise RuntimeError("can't start new thread")
    start(thread)


if os.environ.get("REFUSE"):
    threading.Thread.start = refuse


@task(tags=gpu(memory="64MiB", framework="none"))
def say(text):
    print(text)
    return len(text)


@flow(task_runner=GPUTaskRunner(devices="host", reports=False))
def says():
    return [say.submit(text).result() for text in ("before", "\\u00e9\\u2603", "after")]


print("LENGTHS", says())
"""


def test_characters_that_the_stream_does_not_have_are_written_as_escapes(place: Workplace) -> None:
    place.write("says.py", PROGRAM)
    changes = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = place.run("says.py", environment=changes)
    assert [line for line in done.stdout.splitlines() if line in ("before", "after")] == [
        "before",
        "after",
    ]
    assert "\\xe9\\u2603" in done.stdout


def test_output_that_no_thread_writes_is_said_once_and_holds_nothing_up(place: Workplace) -> None:
    place.write("says.py", PROGRAM)
    done = place.run("says.py", environment={"REFUSE": "1"})
    assert "LENGTHS [6, 2, 5]" in done.stdout
    assert done.stderr.count("what tasks print is held back") == 1
    assert "can't start new thread" in done.stderr

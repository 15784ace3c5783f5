"""Without `PREFECT_API_URL` Prefect boots a server for the flow: children share it, and none is left."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.programs import ARRIVED, SCRIPT, Workplace, workplace

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    with workplace(tmp_path, None) as made:
        yield made


class Watch:
    """Notes every server that is seen while a program runs."""

    def __init__(self, place: Workplace) -> None:
        self._place = place
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look)
        #: Process ids.
        self.servers: set[int] = set()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stopped.wait(0.05):
            self.servers |= {
                pid for pid, command in self._place.processes().items() if "uvicorn" in command
            }


def test_children_share_the_server_of_the_flow(place: Workplace) -> None:
    place.write("script.py", SCRIPT)
    with Watch(place) as watch:
        done = place.run("script.py")
    assert ARRIVED in done.stdout
    assert done.stdout.count("child prints") == 2
    assert len(watch.servers) == 1
    assert "Starting temporary server" in done.stderr
    assert done.stderr.count("Starting temporary server") == 1
    # The fixture fails if one of its processes, the server or a child, is left.
    assert not [pid for pid in watch.servers if os.path.exists(f"/proc/{pid}")]


def test_a_flow_inside_a_child_uses_the_same_server(place: Workplace) -> None:
    place.write(
        "script.py",
        """
from prefect import flow, get_client, task
from prefect.artifacts import create_markdown_artifact
from prefect_gpu import GPUTaskRunner, gpu

@flow
def inner():
    return "inner ran"

@task(tags=gpu(memory="64MiB", framework="none"))
def outer():
    with get_client(sync_client=True) as client:
        url = str(client.api_url)
    create_markdown_artifact("from a child", key="child")
    return inner(), url

@flow(task_runner=GPUTaskRunner(devices="host"))
def whole():
    with get_client(sync_client=True) as client:
        url = str(client.api_url)
    assert outer.submit().result() == ("inner ran", url)
    return "all arrived"

print("RESULT", whole())
""",
    )
    with Watch(place) as watch:
        done = place.run("script.py")
    assert ARRIVED in done.stdout
    assert len(watch.servers) == 1

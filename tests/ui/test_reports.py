"""Reports in a real browser, Chromium, on a real Prefect server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_gpu.live.progress import RunCounts
from prefect_gpu.reports.publish import ProgressArtifact, flow_artifact, task_artifact
from prefect_gpu.units import GIB
from tests.cases import needs
from tests.fakes.reports import flow_reports, task_report
from tests.ui.capture import (
    CHROMIUM,
    PATIENCE_MS,
    UI,
    artifact_id,
    browser,
    open_artifact,
    open_page,
    save,
)
from tests.ui.server import running_server

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    needs("playwright", "PIL"),
    pytest.mark.ui,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: apt-get install chromium"),
]


#: As PyTorch writes it.
PAGE = "|====|\n| PyTorch CUDA memory summary, device ID 0 |\n|----|\n"


@pytest.fixture(scope="module")
def api_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    ran_out = task_report(task_name="ran-out", outcome="oom", memory_summary=PAGE)
    with (
        running_server(tmp_path_factory.mktemp("prefect")) as url,
        temporary_settings({PREFECT_API_URL: url}),
    ):
        with get_client(sync_client=True) as client:
            client.create_artifact(task_artifact(task_report()))
            client.create_artifact(task_artifact(ran_out))
            client.create_artifact(
                flow_artifact(flow_reports(), flow_name="nightly", flow_run_id=None)
            )
            counts = RunCounts(40, 4, 16, {"Completed": 20})
            progress = ProgressArtifact(lambda: counts, flow_name="nightly", flow_run_id=None)
            progress.publish(client)
        yield url


@pytest.fixture(scope="module")
def open_tab(api_url: str) -> Iterator[Callable[[bool], Page]]:
    """Opens a page, dark or not, in the browser of all tests."""
    with browser() as opened:
        yield opened


@pytest.fixture
def page(open_tab: Callable[[bool], Page], request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page, dark if the test says so."""
    opened = open_tab(request.node.callspec.params.get("dark", False))
    yield opened
    opened.close()


def keep(page: Page, name: str) -> None:
    """Save a screenshot in the folder that the environment names."""
    if folder := os.environ.get("PREFECT_GPU_TEST_PICTURES"):
        save(page, Path(folder, name))


def check_scheme(page: Page, folder: Path, name: str, dark: bool) -> None:
    """Save a screenshot, also without a folder in the environment; one of a dark page is dark."""
    from PIL import Image

    out = Path(os.environ.get("PREFECT_GPU_TEST_PICTURES", folder), name)
    save(page, out)
    with Image.open(out) as picture:
        width, height = picture.size
        corner = picture.convert("L").getpixel((width - 3, height - 3))
    assert isinstance(corner, int) and (corner < 80) == dark, corner


UIS = pytest.mark.parametrize("ui", ["v2", "v1"])
#: Each UI, and each colour scheme, once.
SCHEMES = pytest.mark.parametrize(("ui", "dark"), [("v2", False), ("v1", True)])


@SCHEMES
def test_a_browser_shows_the_numbers_and_the_chart_of_a_task_report(
    api_url: str, page: Page, tmp_path: Path, ui: UI, dark: bool
) -> None:
    seen = open_artifact(page, api_url, artifact_id(api_url, "gpu-memory-evaluate"), ui)
    check_scheme(page, tmp_path, f"task-report-{ui}{'-dark' * dark}.png", dark)
    assert seen.image_widths == [720]
    assert "it needed 5.5GiB of its 6GiB budget (92%)" in seen.text
    assert "Peak held by the framework" in seen.text
    assert "load weights" in seen.text
    assert "&amp;" not in seen.text and "\\_" not in seen.text
    numbers = unfold(page, "Raw numbers", "Raw numbers, in bytes and seconds")
    assert f"budget_bytes: {6 * GIB}" in numbers


def unfold(page: Page, name: str, title: str) -> list[str]:
    """Click on a title; return the lines that this shows."""
    shown = page.locator("details", has_text=name).locator("pre")
    assert not shown.is_visible()
    page.get_by_text(title).click()
    shown.wait_for(state="visible", timeout=PATIENCE_MS)
    return shown.inner_text().splitlines()


@UIS
def test_a_click_unfolds_the_memory_summary_of_pytorch(api_url: str, page: Page, ui: UI) -> None:
    open_artifact(page, api_url, artifact_id(api_url, "gpu-memory-ran-out"), ui)
    title = "PyTorch's memory summary when memory ran out"
    assert unfold(page, "PyTorch's memory summary", title) == PAGE.splitlines()


@pytest.mark.parametrize(("ui", "dark"), [("v2", True), ("v1", False)])
def test_a_browser_shows_every_process_and_the_devices_of_a_flow_report(
    api_url: str, page: Page, tmp_path: Path, ui: UI, dark: bool
) -> None:
    seen = open_artifact(page, api_url, artifact_id(api_url, "gpu-flow-nightly"), ui)
    check_scheme(page, tmp_path, f"flow-report-{ui}{'-dark' * dark}.png", dark)
    assert seen.image_widths == [720]
    assert "17 task runs: 16 completed, 1 failed; 19 attempts" in seen.text
    assert "gpu:memory=16GiB" in seen.text
    assert "evaluate-vit-b16-int8" in seen.text


@UIS
def test_a_browser_shows_the_progress_of_a_flow(api_url: str, page: Page, ui: UI) -> None:
    path = f"artifacts/artifact/{artifact_id(api_url, 'gpu-progress-nightly')}"
    open_page(page, api_url, path, "20 of 40 ended, 4 running, 16 waiting for a device", ui)
    page.get_by_text("50%").first.wait_for(state="visible", timeout=PATIENCE_MS)


class TwoModels:
    """A run of `tests.ui.two_models`, whose second task waits for the first one."""

    def __init__(self, api_url: str, folder: Path) -> None:
        self._until, self._log = folder / "until", folder / "log"
        environment = {**os.environ, "PREFECT_API_URL": api_url}
        command = [sys.executable, "-m", "tests.ui.two_models", str(self._until)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self.waiting = self._wait_for_log(api_url)
        except BaseException:
            self.end()
            raise

    def _wait_for_log(self, api_url: str) -> UUID:
        """Wait until the API knows why the second one waits; return the id of its task run."""
        ends = time.monotonic() + PATIENCE_MS / 1000
        while time.monotonic() < ends and self.process.poll() is None:
            lines = httpx.post(f"{api_url}/logs/filter", json={}, timeout=30).json()
            for line in lines:
                if line["message"].startswith("Waiting for 8GiB"):
                    self.flow_run = UUID(line["flow_run_id"])
                    return UUID(line["task_run_id"])
            time.sleep(0.2)
        raise RuntimeError(f"nothing waits; its output:\n{self._log.read_text()[-4000:]}")

    def finish(self) -> None:
        """Let both end."""
        self._until.touch()
        assert self.process.wait(PATIENCE_MS / 1000) == 0, self._log.read_text()[-4000:]

    def end(self) -> None:
        """Leave no process."""
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def two_models(api_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoModels]:
    running = TwoModels(api_url, tmp_path_factory.mktemp("two_models"))
    yield running
    running.end()


@SCHEMES
def test_a_browser_shows_why_a_task_waits(
    api_url: str, two_models: TwoModels, page: Page, ui: UI, dark: bool
) -> None:
    path = f"runs/task-run/{two_models.waiting}"
    text = open_page(page, api_url, path, "Waiting for 8GiB on device 0", ui)
    keep(page, f"waiting-{ui}{'-dark' * dark}.png")
    assert two_models.process.poll() is None, "it waits still"
    assert "AwaitingGPU" in text
    assert "deep" in text


@UIS
def test_a_browser_shows_a_leaderboard(
    api_url: str, two_models: TwoModels, page: Page, ui: UI
) -> None:
    two_models.finish()
    seen = open_artifact(page, api_url, artifact_id(api_url, "gpu-leaderboard-two-models"), ui)
    keep(page, f"leaderboard-{ui}.png")
    assert seen.image_widths == [720]
    assert "Best: deep, accuracy 0.97, with 6GiB" in seen.text
    assert seen.text.index("0.97") < seen.text.index("0.91")


@SCHEMES
def test_the_cards_of_a_flow_run_begin_with_what_they_are_of(
    api_url: str, two_models: TwoModels, page: Page, ui: UI, dark: bool
) -> None:
    two_models.finish()
    path = f"runs/flow-run/{two_models.flow_run}"
    open_page(page, api_url, path, "Artifacts", ui)
    page.get_by_text("Artifacts", exact=True).last.click()
    for words in (
        "Flow report · 2 task runs",
        "Leaderboard · ordered",
        "wide · att",
        "deep · att",
    ):
        page.get_by_text(words).first.wait_for(state="visible", timeout=PATIENCE_MS)
    keep(page, f"artifacts-{ui}{'-dark' * dark}.png")

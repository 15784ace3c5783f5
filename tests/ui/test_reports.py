"""Reports in a real browser, Chromium, on a real Prefect server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_gpu.live.progress import RunCounts
from prefect_gpu.reports.publish import ProgressArtifact, flow_artifact, task_artifact
from tests.fakes.reports import flow_reports, task_report

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("PIL.Image", reason="pillow is not installed")

from tests.ui.capture import (
    CHROMIUM,
    PATIENCE_MS,
    UI,
    artifact_id,
    browser_page,
    open_artifact,
    save,
)
from tests.ui.server import running_server

pytestmark = [
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


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where screenshots go: a temporary folder, or the one named in the environment."""
    return Path(os.environ.get("PREFECT_GPU_TEST_PICTURES", tmp_path))


@pytest.mark.parametrize("ui", ["v2", "v1"])
def test_a_browser_shows_the_numbers_and_the_chart_of_a_task_report(
    api_url: str, pictures: Path, ui: UI
) -> None:
    with browser_page() as page:
        seen = open_artifact(page, api_url, artifact_id(api_url, "gpu-memory-evaluate"), ui)
        save(page, pictures / f"task-report-{ui}.png")
    assert seen.image_widths == [720]
    assert "it needed 5.5GiB of its 6GiB budget (92%)" in seen.text
    assert "Peak held by the framework" in seen.text
    assert "load weights" in seen.text
    assert "&amp;" not in seen.text and "\\_" not in seen.text


@pytest.mark.parametrize("ui", ["v2", "v1"])
def test_a_click_unfolds_the_memory_summary_of_pytorch(api_url: str, ui: UI) -> None:
    with browser_page() as page:
        open_artifact(page, api_url, artifact_id(api_url, "gpu-memory-ran-out"), ui)
        shown = page.locator("details", has_text="PyTorch's memory summary").locator("pre")
        assert not shown.is_visible()
        page.get_by_text("PyTorch's memory summary when memory ran out").click()
        assert shown.is_visible()
        assert shown.inner_text().splitlines() == PAGE.splitlines()


@pytest.mark.parametrize("ui", ["v2", "v1"])
def test_a_browser_shows_every_process_and_the_devices_of_a_flow_report(
    api_url: str, pictures: Path, ui: UI
) -> None:
    with browser_page() as page:
        seen = open_artifact(page, api_url, artifact_id(api_url, "gpu-flow-nightly"), ui)
        save(page, pictures / f"flow-report-{ui}.png")
    assert seen.image_widths == [720]
    assert "17 task runs: 16 completed, 1 failed; 19 attempts" in seen.text
    assert "gpu:memory=5GiB" in seen.text
    assert "evaluate-vit-b16-int8" in seen.text


@pytest.mark.parametrize("path", ["v2/artifacts/artifact", "artifacts/artifact"], ids=["v2", "v1"])
def test_a_browser_shows_the_progress_of_a_flow(api_url: str, path: str) -> None:
    progress = artifact_id(api_url, "gpu-progress-nightly")
    with browser_page() as page:
        page.goto(f"{api_url.removesuffix('/api')}/{path}/{progress}", timeout=PATIENCE_MS)
        words = page.get_by_text("20 of 40 ended, 4 running, 16 waiting for a device").first
        words.wait_for(state="visible", timeout=PATIENCE_MS)
        page.get_by_text("50%").first.wait_for(state="visible", timeout=PATIENCE_MS)


def test_a_chart_is_readable_on_a_dark_page(api_url: str, pictures: Path) -> None:
    with browser_page(dark=True) as page:
        seen = open_artifact(page, api_url, artifact_id(api_url, "gpu-memory-evaluate"))
        save(page, pictures / "task-report-dark.png")
    assert seen.image_widths == [720]

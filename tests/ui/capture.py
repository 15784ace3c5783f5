"""Open an artifact's page in Chromium, or any other page of Prefect's UI, read it and save a screenshot.

    python -m tests.ui.capture --api-url http://127.0.0.1:4200/api --key gpu-memory-evaluate --out a.png
    python -m tests.ui.capture --api-url http://127.0.0.1:4200/api --page runs/task-run/ID --words Waiting --out a.png
    python -m tests.ui.capture --reports reports.txt --key gpu-memory-train --out a.png

The third form shows what `tests.gpu.check_reports` printed on another machine, on a server of its own. Needs Chromium
(`apt-get install chromium`) and playwright's Python package, without its browsers.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

UI = Literal["v1", "v2"]

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    "",
)
#: No sandbox, because tests run as root in containers. The others keep it from using the network.
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 120_000


@dataclass(frozen=True)
class Seen:
    """What the page showed."""

    text: str
    #: Natural widths of the images that hold charts, in pixels; 0: broken.
    image_widths: list[int]


@contextmanager
def browser(width: int = 1280) -> Iterator[Callable[[bool], Page]]:
    """Open Chromium; yield a function that opens a page, dark or not."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=FLAGS, timeout=PATIENCE_MS
        )

        @functools.cache
        def context(dark: bool) -> BrowserContext:
            scheme: Literal["dark", "light"] = "dark" if dark else "light"
            made = chromium.new_context(
                viewport={"width": width, "height": 1000}, color_scheme=scheme
            )
            # The older UI is dark until a person chooses.
            made.add_init_script(f"localStorage.setItem('color-scheme', '\"{scheme}\"')")
            return made

        try:
            yield lambda dark: context(dark).new_page()
        finally:
            chromium.close()


@contextmanager
def browser_page(width: int = 1280, *, dark: bool = False) -> Iterator[Page]:
    """Open Chromium with one page."""
    with browser(width) as open_tab:
        yield open_tab(dark)


def artifact_id(api_url: str, key: str) -> UUID:
    """Find the newest artifact of a key."""
    import httpx

    # Not `/artifacts/KEY/latest`: that id is the collection's, which has no page.
    wanted = {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC", "limit": 1}
    answer = httpx.post(f"{api_url}/artifacts/filter", json=wanted, timeout=30)
    answer.raise_for_status()
    return UUID(answer.json()[0]["id"])


def open_artifact(page: Page, api_url: str, artifact: UUID, ui: UI = "v2") -> Seen:
    """Open an artifact's page and wait until its charts are there."""
    base = api_url.removesuffix("/api")
    path = f"{'v2/' if ui == 'v2' else ''}artifacts/artifact/{artifact}"
    page.goto(f"{base}/{path}", timeout=PATIENCE_MS)
    image = page.locator('img[src^="data:image/svg+xml"]').first
    image.wait_for(state="visible", timeout=PATIENCE_MS)
    page.locator("table").first.wait_for(state="visible", timeout=PATIENCE_MS)
    # Read in the step that waits: the page may draw all of the report anew at any time.
    drawn = page.wait_for_function(
        """() => {
            const charts = [...document.images].filter(i => i.src.startsWith('data:'));
            const isDrawn = charts.length && charts.every(i => i.complete) && document.querySelector('table');
            return isDrawn && [document.body.innerText, charts.map(i => i.naturalWidth)];
        }""",
        timeout=PATIENCE_MS,
    )
    text, widths = drawn.json_value()
    return Seen(text, widths)


def open_page(page: Page, api_url: str, path: str, words: str, ui: UI = "v2") -> str:
    """Open a page and wait until it shows some words; return all its text.

    Args:
        path: Of the page in both UIs, as `runs/task-run/ID`.
        words: What the page shows once it is complete.
    """
    base = api_url.removesuffix("/api")
    page.goto(f"{base}/{'v2/' if ui == 'v2' else ''}{path}", timeout=PATIENCE_MS)
    page.get_by_text(words).first.wait_for(state="visible", timeout=PATIENCE_MS)
    return page.locator("body").inner_text()


def save(page: Page, out: Path, limit_bytes: int = 150_000) -> None:
    """Save the whole page as a PNG of at most `limit_bytes`, by fewer colours where it must."""
    from PIL import Image

    # The UI scrolls inside the page: a tall window shows all of it.
    height = page.evaluate(
        "Math.max(...[...document.querySelectorAll('*')].map(e => e.scrollHeight))"
    )
    size = page.viewport_size or {"width": 1280, "height": 1000}
    page.set_viewport_size({"width": size["width"], "height": min(int(height) + 20, 4000)})
    page.wait_for_timeout(500)
    picture: Any = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    out.parent.mkdir(parents=True, exist_ok=True)
    picture.save(out, optimize=True)
    for colours in (256, 128, 64, 32):
        if out.stat().st_size <= limit_bytes:
            return
        fewer = picture.quantize(
            colours, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
        fewer.save(out, optimize=True)


@contextmanager
def server_with(reports: Path) -> Iterator[str]:
    """Start a server that has the artifacts which `tests.gpu.check_reports` printed; yield its API's URL."""
    import httpx

    from tests.ui.server import running_server

    lines = reports.read_text(encoding="utf-8").splitlines()
    found = next(line for line in lines if line.startswith("ARTIFACTS "))
    with tempfile.TemporaryDirectory() as home, running_server(Path(home)) as url:
        for artifact in json.loads(found.partition(" ")[2]):
            httpx.post(f"{url}/artifacts/", json=artifact, timeout=30).raise_for_status()
        yield url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--api-url")
    source.add_argument("--reports", type=Path, help="a file of what check_reports printed")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--artifact-id", type=UUID)
    which.add_argument("--key", help="the newest artifact of this key")
    which.add_argument("--page", help="a page's path, as runs/task-run/ID; give --words too")
    parser.add_argument("--words", default="", help="what the page shows once it is complete")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ui", choices=("v1", "v2"), default="v2")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()
    server = server_with(given.reports) if given.reports else nullcontext(given.api_url)
    with server as api_url, browser_page(given.width, dark=given.dark) as page:
        if given.page:
            open_page(page, api_url, given.page, given.words, given.ui)
            charts = []
        else:
            found = given.artifact_id or artifact_id(api_url, given.key)
            charts = open_artifact(page, api_url, found, given.ui).image_widths
        save(page, given.out)
    print(f"{given.out}: {given.out.stat().st_size} bytes, charts {charts} wide")


if __name__ == "__main__":
    main()

"""The README's quick start as it is typed, from the clone to the first picture in a browser, on a loaded machine.

    python -m tests.install.first_picture --times 5 --busy-loops 4

Each time in a new clone, a new virtual environment and a new home folder. Prints the seconds of each step; ends with 1 if
a step fails. Port 4200 must be free. `test_quick_start.py` runs the same commands once, without a browser.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from tests.install.environments import outer_environment
from tests.install.test_quick_start import TORCH, quick_start
from tests.integration.programs import REPOSITORY
from tests.ui.capture import browser_page, open_artifact

API = "http://127.0.0.1:4200/api"

#: Only breaks a deadlock.
LIMIT_S = 3000.0


@contextmanager
def _busy(loops: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


def _opens(server: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends and server.poll() is None:
        try:
            with urllib.request.urlopen(API.removesuffix("/api"), timeout=10) as page:
                page.read()
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"no page at {API}; the server's exit code is {server.poll()}")


def _once(folder: Path) -> list[str]:
    """Type the commands in a folder, open the report; return what took how long."""
    clone, scripts = folder / "clone", folder / "venv" / "bin"
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    (folder / "constraint.txt").write_text(TORCH)
    environment = outer_environment() | {
        "HOME": str(folder),
        "PATH": f"{scripts}:/usr/local/bin:/usr/bin:/bin",
        "PIP_CONSTRAINT": str(folder / "constraint.txt"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    # Where this machine takes its packages from.
    pip_settings = Path.home() / ".config" / "pip" / "pip.conf"
    if pip_settings.exists():
        environment["PIP_CONFIG_FILE"] = str(pip_settings)
    took, server, printed = [], None, ""
    try:
        for words in (command.words for command in quick_start()):
            began_s = time.monotonic()
            if words == ("prefect", "server", "start"):
                with (folder / "server.log").open("wb") as log:
                    server = subprocess.Popen(
                        words, cwd=clone, env=environment, stdout=log, stderr=log
                    )
                _opens(server)
            else:
                done = subprocess.run(
                    words,
                    cwd=clone,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=LIMIT_S,
                )
                printed = done.stdout + done.stderr
                # `doctor` says with 1 that a machine without a GPU has a problem.
                if done.returncode != 0 and "doctor" not in words:
                    raise RuntimeError(f"{' '.join(words)}: {done.returncode}\n{printed[-4000:]}")
            took.append(f"{' '.join(words[:2])} {time.monotonic() - began_s:.0f}")
        found = re.search(r"Report of the GPU tasks: \S+/([\w-]+)", printed)
        if found is None:
            raise RuntimeError(f"no address of a report\n{printed[-4000:]}")
        began_s = time.monotonic()
        with browser_page() as page:
            widths = open_artifact(page, API, UUID(found[1])).image_widths
        took.append(f"picture {widths} {time.monotonic() - began_s:.0f}")
    finally:
        if server is not None:
            server.terminate()
            server.wait(60)
    return took


def main() -> int:
    """Print the seconds of each step, each time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument(
        "--busy-loops", type=int, default=4, help="processes that compute beside it"
    )
    given = parser.parse_args()
    failed = 0
    with _busy(given.busy_loops):
        for number in range(1, given.times + 1):
            began_s = time.monotonic()
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                try:
                    said = ", ".join(_once(Path(folder)))
                except Exception as error:
                    failed += 1
                    said = f"FAILED {error}"
            print(f"{number}: {time.monotonic() - began_s:.0f} s in all; {said}", flush=True)
    print(f"{given.times - failed} of {given.times} to the first picture")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

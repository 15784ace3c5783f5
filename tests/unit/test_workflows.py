"""What a hosting service runs is what the Makefile runs."""

from pathlib import Path

import yaml

FILES = Path(__file__).parents[2] / ".github" / "workflows"


def test_workflows_run_make_test_and_make_check_and_nothing_else() -> None:
    jobs = [
        job
        for path in FILES.glob("*.yml")
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
    ]
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert sorted(commands) == ["make check", "make test"]

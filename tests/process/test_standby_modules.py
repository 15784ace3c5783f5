"""Processes that wait ahead of their tasks: what they imported is what would be imported now."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prefect_gpu.processes import standby_kind
from prefect_gpu.processes.launch_spec import ChildStarted
from prefect_gpu.processes.messages import BodyStarted
from tests.process import bodies
from tests.process.rig import eventually, spec_of
from tests.process.warm import Warm, kind_with, module


def test_files_that_modules_of_a_standby_hold_open_are_written(warm: Warm, importable: str) -> None:
    module(importable, "test_holds_files", bodies.HOLDS_FILES)
    announced = warm.announce(kind_with("test_holds_files"))
    (waited,) = warm.wait_ready()
    held = bodies.ImportedAtLoad("test_holds_files")
    child = warm.run(announced, spec_of(bodies.write_to_held_files, held, "all of it"))
    assert child.value() is None and child.pid == waited
    assert child.exit().code == 0
    found = {path.stem: path.read_text().strip() for path in Path(importable).glob("*.txt")}
    assert len(found) == 8 and set(found.values()) == {"all of it"}, found


def test_a_module_may_add_to_the_path_as_it_is_imported(warm: Warm, importable: str) -> None:
    module(importable, "test_adds_to_path", "import sys\nsys.path.insert(0, '/added')\nVALUE = 1")
    announced = warm.announce(kind_with("test_adds_to_path"))
    (waited,) = warm.wait_ready()
    spec = spec_of(bodies.path_with, bodies.ImportedAtLoad("test_adds_to_path"))
    child = warm.run(announced, spec)
    assert child.value() == ["/added", *spec.sys_path]
    assert [m.pid for m in child.messages if isinstance(m, ChildStarted)][-1] == waited


def test_a_module_that_was_imported_while_it_waited_counts(
    warm: Warm, importable: str, tmp_path: Path
) -> None:
    go, done = tmp_path / "go", tmp_path / "done"
    module(
        importable,
        "test_standby_lazy",
        f"""
import os, threading, time

def later():
    while not os.path.exists({str(go)!r}): time.sleep(0.01)
    import test_standby_later
    open({str(done)!r}, "w").close()

threading.Thread(target=later, daemon=True).start()
""",
    )
    module(importable, "test_standby_later", "")
    announced = warm.announce(kind_with("test_standby_lazy"))
    (waited,) = warm.wait_ready()
    go.touch()
    assert eventually(done.exists)
    module(importable, "test_standby_later", "other = 1")
    child = warm.run(announced, spec_of(bodies.add, 1))
    assert child.value() == 1
    assert [m.pid for m in child.messages if isinstance(m, ChildStarted)][-1] != waited


@pytest.mark.parametrize("changed", ["source", "path", "folder"])
def test_a_task_whose_modules_have_changed_gets_a_fresh_process(
    warm: Warm, importable: str, tmp_path: Path, changed: str
) -> None:
    module(importable, "test_standby_changes", "VALUE = 'old'")
    announced = warm.announce(kind_with("test_standby_changes"))
    (waited,) = warm.wait_ready()
    spec = spec_of(bodies.value_of, bodies.ImportedAtLoad("test_standby_changes"))
    expected = "new"
    if changed == "source":
        module(importable, "test_standby_changes", "VALUE = 'new, and longer'")
        expected = "new, and longer"
    elif changed == "path":
        (tmp_path / "before").mkdir()
        module(str(tmp_path / "before"), "test_standby_changes", "VALUE = 'new'")
        spec = replace(spec, sys_path=(str(tmp_path / "before"), *spec.sys_path))
    else:
        (tmp_path / "elsewhere").mkdir()
        spec = replace(spec, cwd=str(tmp_path / "elsewhere"))
        expected = "old"
    child = warm.run(announced, spec)
    assert child.value() == expected
    assert child.of(BodyStarted) is not None
    assert [m.pid for m in child.messages if isinstance(m, ChildStarted)][-1] != waited


def test_a_standby_takes_over_the_umask_and_the_limits_of_its_parent(warm: Warm) -> None:
    announced = warm.announce()
    warm.wait_ready()
    umask, (soft, hard) = os.umask(0o27), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        child = warm.run(announced, spec_of(bodies.umask_and_files))
        assert child.value() == (0o27, soft - 1)
    finally:
        os.umask(umask)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_one_change_of_a_module_counts_once_however_many_had_imported_it(
    make_warm: Callable[..., Warm], importable: str
) -> None:
    module(importable, "test_standby_edited", "VALUE = 1")
    kind, warm = kind_with("test_standby_edited"), make_warm(most=3)
    announced = [warm.announce(kind) for _ in range(4)]
    before = warm.wait_ready(3)
    module(importable, "test_standby_edited", "VALUE = 'another'")
    for one in announced[:3]:
        assert warm.run(one, spec_of(bodies.add, 1)).value() == 1
    assert eventually(
        lambda: warm.pool.ready_by_kind.total() > 0 and not set(before) & set(warm.pool.pids)
    )
    assert warm.pool._record(kind).failures <= 1
    child = warm.run(announced[3], spec_of(bodies.add, 1))
    assert child.value() == 1 and child.pid not in before


def test_a_kind_whose_modules_never_suit_its_tasks_is_given_up_with_the_reason(
    warm: Warm, importable: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module(importable, "test_standby_unsuited", "")
    kind = kind_with("test_standby_unsuited")
    spec = replace(spec_of(bodies.add, 1), cwd=str(tmp_path))
    for _ in range(standby_kind.MOST_FAILURES):
        announced = warm.announce(kind)
        warm.wait_ready()
        assert warm.run(announced, spec).value() == 1
    assert eventually(lambda: bool(warm.pool._record(kind).given_up))
    (told,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "had changed after its imports" in told.getMessage()

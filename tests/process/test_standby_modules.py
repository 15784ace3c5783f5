"""Tasks in processes that waited for them: modules, paths and limits are those of a fresh process."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from prefect_gpu.processes.launch_spec import ChildStarted
from tests.process import bodies
from tests.process.rig import spec_of
from tests.process.warm import Warm, kind_with, module


def test_files_that_modules_in_a_standby_hold_open_are_written(warm: Warm, importable: str) -> None:
    module(importable, "test_holds_files", bodies.HOLDS_FILES)
    announced = warm.announce()
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

"""Settings of libraries arrive in a child: read in the flow's process, and set where they differ."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from prefect_gpu.frameworks import process_settings

STATEMENTS = (
    "",
    "torch.set_default_dtype(torch.bfloat16); numpy.seterr(divide='raise', under='warn')",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.allow_tf32 = False",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "torch.backends.cudnn.benchmark = True; torch.backends.cudnn.deterministic = True",
    "torch.use_deterministic_algorithms(True, warn_only=True); torch.autograd.set_detect_anomaly(True)",
    "torch.multiprocessing.set_sharing_strategy('file_system')",
)

#: Prints, for each statement, the settings of a flow with it, and of a child: each a fork that has imported PyTorch.
PROGRAM = """
import json, os, sys, warnings
import numpy, torch.multiprocessing
from prefect_gpu.frameworks import process_settings

def forked(code):
    reading, writing = os.pipe()
    if not os.fork():
        # With warnings as errors: nothing is set that is as it should be.
        warnings.simplefilter("error")
        exec(code)
        os.write(writing, repr(process_settings.read()).encode())
        os._exit(0)
    os.close(writing)
    return open(reading).read()

for statement in json.loads(sys.argv[1]):
    flow = forked(statement)
    print(json.dumps([statement, flow, forked(f"process_settings.apply({flow})")]))
"""


@pytest.fixture(scope="module")
def settings() -> dict[str, tuple[str, str]]:
    """Return the settings of a flow and of its child, by statement."""
    pytest.importorskip("torch")
    printed = _printed(PROGRAM, json.dumps(STATEMENTS)).splitlines()
    return {statement: (flow, child) for statement, flow, child in map(json.loads, printed)}


def _printed(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_child_has_the_settings_of_the_flow(
    settings: dict[str, tuple[str, str]], statement: str
) -> None:
    flow, child = settings[statement]
    assert flow and child == flow
    assert (flow != settings[""][0]) is bool(statement)


def test_settings_wait_for_the_import_of_their_library(settings: dict[str, Any]) -> None:
    wanted = settings[STATEMENTS[1]][0]
    program = f"""
from prefect_gpu.frameworks import process_settings
process_settings.apply({wanted})
import numpy, torch.multiprocessing
print(process_settings.read())
"""
    assert _printed(program) == wanted


class _Config:
    """JAX's options, as `jax.config`."""

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)
        self.updated: list[str] = []

    def update(self, name: str, value: Any) -> None:
        if name == "jax_debug_nans":
            raise ValueError("refused")
        self.updated.append(name)
        setattr(self, name, value)


def _library(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    return module


def test_options_of_jax_are_set_where_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = _Config(jax_enable_x64=True, jax_debug_nans=True, jax_disable_jit=False)
    monkeypatch.setitem(sys.modules, "jax", _library("jax", config=flow))
    wanted = {"jax": process_settings.read()["jax"]}
    # A version may lack options.
    assert wanted["jax"] == {
        "jax_enable_x64": True,
        "jax_debug_nans": True,
        "jax_disable_jit": False,
    }
    child = _Config(jax_enable_x64=False, jax_debug_nans=False, jax_disable_jit=False)
    monkeypatch.setitem(sys.modules, "jax", _library("jax", config=child))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    process_settings.apply(wanted)
    # What one library refuses does not fail the task.
    assert child.updated == ["jax_enable_x64"]
    # A module of the user's has changed it at its import.
    child.jax_enable_x64 = False
    process_settings.apply_again(wanted)
    assert child.jax_enable_x64 is True


def test_a_library_that_is_not_imported_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    assert "jax" not in process_settings.read()
    process_settings.apply_again({"jax": {"jax_enable_x64": True}})
    assert "jax" not in sys.modules

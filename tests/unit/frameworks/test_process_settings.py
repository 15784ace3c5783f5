"""Settings of libraries arrive in a child: read in the flow's process, and set where they differ."""

from __future__ import annotations

import enum
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from prefect_gpu.frameworks import process_settings
from prefect_gpu.frameworks.hooks import is_lazy

DETERMINISTIC = "torch.use_deterministic_algorithms(True, warn_only=True); torch.autograd.set_detect_anomaly(True)"

STATEMENTS = (
    "",
    "torch.set_default_dtype(torch.bfloat16); numpy.seterr(divide='raise', under='warn')",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.allow_tf32 = False",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "torch.backends.cudnn.benchmark = True; torch.backends.cudnn.deterministic = True",
    DETERMINISTIC,
    "torch.autograd.set_detect_anomaly(True, check_nan=False); torch.backends.cuda.enable_flash_sdp(False)",
    "torch.multiprocessing.set_sharing_strategy('file_system')",
)

#: Prints, for each statement, the settings of a flow with it, and of a child: each a fork that has imported PyTorch.
#: Then those of the statement in the second argument, and what a child that sets them finds without a further import.
PROGRAM = """
import json, os, sys, warnings
import numpy, torch.multiprocessing
from prefect_gpu.frameworks import process_settings

def forked(code, found="process_settings.read()"):
    reading, writing = os.pipe()
    if not os.fork():
        # With warnings as errors: nothing is set that is as it should be.
        warnings.simplefilter("error")
        exec(code)
        os.write(writing, repr(eval(found)).encode())
        os._exit(0)
    os.close(writing)
    return open(reading).read()

for statement in json.loads(sys.argv[1]):
    flow = forked(statement)
    code = f"process_settings.apply({flow})\\nfor name in {flow}: __import__(name)"
    print(json.dumps([statement, flow, forked(code)]))

flow, before = forked(sys.argv[2]), len(sys.modules)
code = f"process_settings.apply({{n: v for n, v in {flow}.items() if n != 'torch._inductor.config'}})"
found = "torch.are_deterministic_algorithms_enabled(), len(sys.modules) - before < 100"
print(json.dumps(["imports", flow, forked(code, found)]))
"""


@pytest.fixture(scope="module")
def settings() -> dict[str, tuple[str, str]]:
    """Return the settings of a flow and of its child, by statement."""
    pytest.importorskip("torch")
    printed = _printed(PROGRAM, json.dumps(STATEMENTS), DETERMINISTIC).splitlines()
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


def test_to_set_a_child_s_settings_imports_little(settings: dict[str, Any]) -> None:
    flow, found = settings["imports"]
    assert "deterministic algorithms': (True, True)" in flow
    assert found == "(True, True)"


def test_settings_wait_for_the_import_of_their_library(settings: dict[str, Any]) -> None:
    wanted = settings[STATEMENTS[1]][0]
    program = f"""
from prefect_gpu.frameworks import process_settings
process_settings.apply({wanted})
import numpy, torch.multiprocessing
print(process_settings.read())
"""
    assert _printed(program) == wanted


class _Promotion(enum.Enum):
    STANDARD = "standard"
    STRICT = "strict"


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


def test_options_of_jax_are_set_where_they_differ(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    switched_on = {"jax_enable_x64": True, "jax_debug_nans": True, "jax_disable_jit": False}
    flow = _Config(**switched_on, jax_numpy_dtype_promotion=_Promotion.STRICT)
    monkeypatch.setitem(sys.modules, "jax", _library("jax", config=flow))
    wanted = {"jax": process_settings.read()["jax"]}
    # A version may lack options. Text: the enum is JAX's, which a child would import to read its task.
    assert wanted["jax"] == {**switched_on, "jax_numpy_dtype_promotion": "strict"}
    defaults = dict.fromkeys(switched_on, False)
    child = _Config(**defaults, jax_numpy_dtype_promotion=_Promotion.STANDARD)
    monkeypatch.setitem(sys.modules, "jax", _library("jax", config=child))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    process_settings.apply(wanted)
    # What a library refuses does not fail the task, and is said once.
    (said,) = caplog.messages
    assert said.startswith("jax: the setting jax_debug_nans is True in the flow's process")
    assert child.updated == ["jax_enable_x64", "jax_numpy_dtype_promotion"]
    assert child.jax_enable_x64 is True and child.jax_numpy_dtype_promotion == "strict"


def test_a_library_that_is_not_imported_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    assert "jax" not in process_settings.read()
    process_settings.apply({"jax": {"jax_enable_x64": True}})
    assert "jax" not in sys.modules


def test_a_library_that_is_loaded_lazily_stays_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "jax.py"
    path.write_text(
        "from tests.unit.frameworks.test_process_settings import _Config\n"
        "config = _Config(jax_enable_x64=False)\n"
    )
    spec = importlib.util.spec_from_file_location("jax", path)
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "jax", lazy)
    spec.loader.exec_module(lazy)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    assert "jax" not in process_settings.read()
    process_settings.apply({"jax": {"jax_enable_x64": True}})
    assert is_lazy(lazy)
    # Now it is loaded.
    assert lazy.config.jax_enable_x64 is True and not is_lazy(lazy)


def test_errors_of_numpy_that_need_an_object_of_the_flow_do_not_arrive() -> None:
    numpy = pytest.importorskip("numpy")
    with numpy.errstate(divide="call", over="log", under="raise", invalid="ignore", call=print):
        errors = process_settings.read()["numpy"]
    assert errors == {"under": "raise", "invalid": "ignore"}

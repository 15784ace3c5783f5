"""Blocks of the documentation that need a GPU run here as they are written. All others run in `tests/integration`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task

from prefect_gpu import GPUTaskRunner, gpu
from tests.gpu.check_suspend_by_hand import Flow, command
from tests.integration.documents import Block, blocks, commands, runs
from tests.integration.programs import REPOSITORY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("nvml", "prefect_server"),
]

#: GiB of the training that is suspended: enough for each line of progress to be printed.
HELD_GIB = 16


def marked(page: str, language: str, words: str) -> Block:
    """Return the block of a page whose reason not to run elsewhere has these words."""
    (found,) = [
        block
        for block in blocks(REPOSITORY / "docs" / page)
        if not runs(block) and block.language == language and words in str(block.mark)
    ]
    return found


def pattern(shown: str, name: str) -> str:
    """Return a pattern of printed lines: a name, any numbers, and `…` for anything."""
    written = re.escape(shown.strip().replace("train-2cf", name))
    written = re.sub(r"\d+(\\\.\d+)?", r"\\d+(\\.\\d+)?", written).replace("…", ".*")
    return re.sub(r"(\\ ){2,}", r"\\s+", written).replace("\\\n", "\n(?:.*\n)*")


def test_commands_that_suspend_a_task_print_what_the_page_shows(
    device_is_clean: Callable[[], int], tmp_path: Path
) -> None:
    block = marked("suspending.md", "console", "a flow that runs")
    options = argparse.Namespace(devices="nvml", held=HELD_GIB)
    training = Flow(options, tmp_path / "flow", steps=1500)
    try:
        name, _ = training.begun()
        for typed in commands(block):
            words = [word.replace("train-2cf", name) for word in typed.words[1:]]
            code, printed = command(*words)
            assert code == 0, printed
            assert re.search(pattern(typed.output, name), printed), printed
        assert len(training.digest()) == 64
    finally:
        training.process.kill()
        training.process.wait()


def test_the_options_of_onnxruntime_are_taken_by_its_cuda_provider(
    device_is_clean: Callable[[], int],
) -> None:
    ort = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("onnxruntime has no CUDAExecutionProvider")
    block = marked("memory.md", "python", "ONNX Runtime for GPUs")
    model = str(Path(__file__).parent / "models" / "product.onnx")

    @task(tags=gpu(memory="4GiB", framework="onnxruntime"))
    def provider(code: str, path: str) -> tuple[str, int]:
        import onnxruntime

        names: dict[str, Any] = {"onnxruntime": onnxruntime, "path": path}
        exec(code, names)
        return names["session"].get_providers()[0], int(names["options"]["gpu_mem_limit"])

    @flow(task_runner=GPUTaskRunner(devices="nvml"))
    def asks() -> tuple[str, int]:
        return provider.submit(block.code, model).result()

    used, limit = asks()
    assert used == "CUDAExecutionProvider" and 0 < limit < 4 << 30

"""Prefect in a body whose process has not imported it: what the body finds is the same as if it had been imported."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.assets import materialize
from prefect.context import AssetContext
from prefect.exceptions import MissingResult

from prefect_gpu import GPUTaskRunner, gpu
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.engine.task_run import ChildContext, EngineRun
from prefect_gpu.errors import ResultError
from prefect_gpu.processes.standby_pool import standby_pool
from prefect_gpu.runner import task_plan
from tests.integration import engine_api as api
from tests.process.rig import eventually
from tests.process.warm import end_sources

pytestmark = pytest.mark.usefixtures("prefect_server")

SMALL = gpu(memory="64MiB", framework="none")


# With Prefect imported before the body a process has Prefect's own set-up: what it then does is what the late one must do.
@pytest.fixture(params=[pytest.param("at once", marks=pytest.mark.slow), "late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a body's process imports Prefect when the body does, or before it."""
    is_late = bool(request.param == "late")
    monkeypatch.setattr(task_plan, "uses_prefect", lambda function: not is_late)
    return is_late


def run(body: Callable[..., Any], *args: Any, log_prints: bool = False, **named: Any) -> Any:
    """Run a body as a GPU task of a flow; return its result and the ids of the task run and flow run."""
    work = task(tags=[*SMALL, "of-the-task"], log_prints=log_prints)(body)
    ids: list[Any] = []

    @flow(task_runner=GPUTaskRunner(devices=api.ONE, reports=False, start_method="spawn"))
    def around(held: int) -> Any:
        from prefect.runtime import flow_run

        future = work.submit(*args, **named)
        ids[:] = [future.task_run_id, flow_run.id]
        return future.result()

    return (around(3), *ids)


def test_a_process_imports_prefect_only_for_a_body_that_uses_it_or_whose_prints_are_logged() -> (
    None
):
    def look() -> list[str]:
        import sys

        print("said by the body")
        return [name for name in sys.modules if name.partition(".")[0] in ("prefect", "pydantic")]

    assert run(look)[0] == []
    seen, task_run_id, flow_run_id = run(look, log_prints=True)
    assert seen != []
    logged = api.logs(flow_run_id, ["said by the body"])["said by the body"]
    assert logged.task_run_id == task_run_id


@dataclass(frozen=True)
class Seen:
    """What one body found. Several tests read it: each process that imports Prefect takes a second to do so."""

    found: dict[str, Any]
    task_run_id: UUID
    flow_run_id: Any


@functools.cache
def _look_around(late: bool) -> Seen:
    def look(
        weights: Any, options: list[int], *rest: int, name: str, scale: float = 2.0, **others: Any
    ) -> Any:
        import logging
        import sys

        before = "prefect" in sys.modules
        import prefect.runtime
        from prefect import flow, get_run_logger, task
        from prefect.artifacts import create_markdown_artifact
        from prefect.blocks.system import Secret
        from prefect.context import FlowRunContext, TagsContext, TaskRunContext, get_run_context
        from prefect.events import emit_event
        from prefect.runtime import flow_run, task_run
        from prefect.settings import PREFECT_API_URL
        from prefect.states import Completed
        from prefect.variables import Variable

        context = get_run_context()
        named = task_run.parameters
        same = named["weights"] is weights and named["options"] is options
        found: dict[str, Any] = {
            "before": before,
            "run": {
                "id": str(prefect.runtime.task_run.id),
                "tags": sorted(prefect.runtime.task_run.tags),
                "context": str(context.task_run.id),
                "inherited": sorted(TagsContext.get().current_tags),
                "flow": (str(prefect.runtime.flow_run.id), prefect.runtime.flow_run.parameters),
                "parameters": FlowRunContext.get().parameters,
                "url": PREFECT_API_URL.value(),
                "answers": context.client.hello().status_code,
            },
            "same": same and TaskRunContext.get().parameters == named,
            "named": {**named, "weights": named["weights"].nbytes},
            "state": Completed(message="done"),
        }
        get_run_logger().info("of the run")
        logging.getLogger("prefect_gpu.of_a_test").warning("of the package")
        emit_event("of.the.body", {"prefect.resource.id": "a"})
        create_markdown_artifact("text", key=name)

        @task
        def inner() -> str:
            return str(task_run.id)

        @flow
        def below() -> str:
            inner.submit().result()
            return str(flow_run.parent_flow_run_id)

        Variable.set(name.replace("-", "_"), "value", overwrite=True)
        Secret(value="hidden").save(name, overwrite=True)
        found["inner"], found["below"] = inner(), below()
        found["kept"] = Variable.get(name.replace("-", "_")), Secret.load(name).get()
        found["after"] = str(task_run.id)
        return found

    numpy = pytest.importorskip("numpy")
    name = f"late-{late}".lower()
    return Seen(*run(look, numpy.zeros(300_000), [1, 2], 3, 4, name=name, rate=0.5))


@pytest.fixture
def seen(late: bool) -> Seen:
    return _look_around(late)


def test_a_body_finds_its_run(late: bool, seen: Seen) -> None:
    assert seen.found["before"] is not late
    found = seen.found["run"]
    assert found == {
        "id": str(seen.task_run_id),
        "tags": sorted([*SMALL, "of-the-task"]),
        "context": str(seen.task_run_id),
        "inherited": [],
        "flow": (seen.flow_run_id, {"held": 3}),
        "parameters": {"held": 3},
        "url": os.environ.get("PREFECT_API_URL", found["url"]),
        "answers": 200,
    }


def test_a_body_finds_its_arguments_by_name(late: bool, seen: Seen) -> None:
    assert seen.found["same"], "each object has travelled once"
    assert seen.found["named"] == {
        "weights": 2_400_000, "options": [1, 2], "rest": (3, 4), "name": f"late-{late}".lower(), "scale": 2.0, "others": {"rate": 0.5}
    }  # fmt: skip


def test_what_a_body_logs_emits_and_publishes_is_of_its_run(late: bool, seen: Seen) -> None:
    found = api.logs(seen.flow_run_id, ["of the run", "of the package"])
    said = {found[message].task_run_id for message in ("of the run", "of the package")}
    assert said == {seen.task_run_id}
    (artifact,) = api.artifacts(task_run_id=seen.task_run_id, count=1)
    assert artifact.key == f"late-{late}".lower()


def test_a_body_may_call_tasks_and_flows_and_use_variables_and_blocks(seen: Seen) -> None:
    found = seen.found
    assert found["inner"] != str(seen.task_run_id) and found["below"] == seen.flow_run_id
    assert found["kept"] == ("value", "hidden")
    assert found["after"] == str(seen.task_run_id)


def test_a_value_of_a_class_of_prefect_comes_back(seen: Seen) -> None:
    assert seen.found["state"].message == "done"


def test_an_async_body_finds_its_run_and_its_error_of_a_class_of_prefect_comes_back(
    late: bool,
) -> None:
    async def fail() -> None:
        from prefect import get_run_logger
        from prefect.context import get_run_context
        from prefect.exceptions import MissingResult

        get_run_logger().info("in the coroutine")
        raise MissingResult(str(get_run_context().task_run.id))

    with pytest.raises(MissingResult) as caught:
        run(fail)
    found = api.task_run(UUID(str(caught.value)))
    assert found.flow_run_id is not None and found.name.startswith("fail")
    log = api.logs(found.flow_run_id, ["in the coroutine"])["in the coroutine"]
    assert log.task_run_id == found.id


def test_what_a_body_sets_in_its_transaction_and_of_its_assets_is_set_in_the_flow(
    late: bool,
) -> None:
    seen: list[Any] = []

    def note(transaction: Any) -> None:
        context = AssetContext.get()
        assert context is not None
        seen.append((transaction.get("id"), context.materialization_metadata))

    def body(fails: bool) -> None:
        from prefect.assets import add_asset_metadata
        from prefect.transactions import get_transaction

        transaction = get_transaction()
        assert transaction is not None and transaction.get("id", 1) == 1
        transaction.set("id", (each for each in ()) if fails else {"a": 2})
        add_asset_metadata("bugs://model", {"acc": 1})

    work = materialize("bugs://model", tags=SMALL, on_commit=[note])(body)

    @flow(task_runner=GPUTaskRunner(devices=api.ONE, reports=False, start_method="spawn"))
    def around(fails: bool) -> None:
        work.submit(fails).result()

    around(False)
    assert seen == [({"a": 2}, {"bugs://model": {"acc": 1}})]
    with pytest.raises(ResultError, match="the transaction of a GPU task cannot be sent"):
        around(True)
    assert len(seen) == 1


def test_the_first_warning_of_any_logger_is_shown_as_prefect_shows_it(
    late: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def warn() -> list[str]:
        import logging

        logging.basicConfig(level=logging.DEBUG, format="not this %(message)s")
        logging.getLogger("mine.below").info("not shown")
        logging.getLogger("mine.below").warning("first %d", 1)
        logging.getLogger("mine.below").warning("second")
        logging.getLogger("prefect.mine").info("third")
        return [type(handler).__name__ for handler in logging.getLogger().handlers]

    assert run(warn)[0] == ["PrefectConsoleHandler"]
    shown = [line.partition("| ")[2].rstrip() for line in capfd.readouterr().err.splitlines()]
    said = [line for line in shown if "mine" in line]
    assert said == [
        "WARNING | mine.below - first 1",
        "WARNING | mine.below - second",
        "INFO    | prefect.mine - third",
    ]


def test_what_a_body_does_to_logging_is_kept(late: bool, tmp_path: Path) -> None:
    def log_to(path: str) -> dict[str, Any]:
        import logging

        root, own = logging.getLogger(), logging.getLogger("mine")
        handler = logging.FileHandler(path, mode="w")
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        fastapi = logging.getLogger("fastapi")
        fastapi.setLevel(logging.CRITICAL)
        fastapi.addHandler(handler)
        own.propagate = False
        own.addHandler(handler)
        logging.getLogger("other").info("before")
        import prefect.main  # noqa: F401

        logging.getLogger("other").info("after")
        own.warning("of its own")
        return {
            "root": [type(each).__name__ for each in root.handlers],
            "levels": [root.level, fastapi.level, logging.getLogger("prefect").level],
            "fastapi": handler in fastapi.handlers,
        }

    path = tmp_path / "log.txt"
    seen, _, _ = run(log_to, os.fspath(path))
    assert seen == {
        "root": ["PrefectConsoleHandler", "FileHandler"],
        "levels": [20, 50, 20],
        "fastapi": True,
    }
    assert path.read_text().splitlines() == ["other: before", "other: after", "mine: of its own"]


def test_a_body_that_takes_prefects_handlers_away_keeps_its_own(late: bool) -> None:
    def configure() -> list[str]:
        import io
        import logging

        logging.basicConfig(stream=io.StringIO(), force=True)
        logging.getLogger("mine").warning("to the text")
        import prefect.main  # noqa: F401

        return [type(handler).__name__ for handler in logging.getLogger().handlers]

    assert run(configure)[0] == ["StreamHandler"]


def test_a_module_that_sets_logging_up_as_it_is_imported_does_so_beside_prefects_handlers(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_prefect_module.py").write_text(
        "import logging\n"
        "logging.basicConfig(level=logging.DEBUG)\n"
        "def look():\n"
        "    names = [type(each).__name__ for each in logging.getLogger().handlers]\n"
        "    import prefect.main\n"
        "    return names, [type(each).__name__ for each in logging.getLogger().handlers], logging.root.level\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    look = importlib.import_module("late_prefect_module").look
    before, after, level = run(look)[0]
    assert before == ["_StandIn" if late else "PrefectConsoleHandler"]
    assert (after, level) == (["PrefectConsoleHandler"], 30)


def test_settings_of_logging_hold_from_the_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def log() -> None:
        import logging

        logging.getLogger("mine").warning("to the API")
        logging.getLogger("mine.below").debug("shown")

    config = tmp_path / "logging.yml"
    config.write_text(
        """
version: 1
disable_existing_loggers: false
formatters: {own: {format: 'own %(message)s'}}
handlers:
  own: {class: logging.StreamHandler, formatter: own}
  api: {class: prefect.logging.handlers.APILogHandler}
loggers:
  prefect.extra: {level: INFO, handlers: [api]}
  mine: {level: DEBUG, handlers: [own]}
"""
    )
    from prefect.settings import (
        PREFECT_LOGGING_EXTRA_LOGGERS,
        PREFECT_LOGGING_SETTINGS_PATH,
        temporary_settings,
    )

    monkeypatch.setenv("PREFECT_LOGGING_SETTINGS_PATH", os.fspath(config))
    monkeypatch.setenv("PREFECT_LOGGING_EXTRA_LOGGERS", "mine")
    changes = {PREFECT_LOGGING_SETTINGS_PATH: config, PREFECT_LOGGING_EXTRA_LOGGERS: "mine"}
    with temporary_settings(changes):
        _, task_run_id, flow_run_id = run(log)
    assert api.logs(flow_run_id, ["to the API"])["to the API"].task_run_id == task_run_id
    assert "own shown" in capfd.readouterr().err


def test_coroutines_and_threads_find_the_run_wherever_prefect_is_imported_first(late: bool) -> None:
    def look() -> dict[str, Any]:
        import asyncio
        import threading
        from contextvars import copy_context

        found: dict[str, Any] = {}

        def find(name: str) -> None:
            from prefect.context import TaskRunContext

            context = TaskRunContext.get()
            found[name] = None if context is None else str(context.task_run.id)

        def in_thread(name: str, target: Any, *args: Any) -> None:
            thread = threading.Thread(target=target, args=(*args, name))
            thread.start()
            thread.join()

        async def one(name: str) -> None:
            await asyncio.sleep(0)
            find(name)

        async def several() -> None:
            await asyncio.gather(one("first"), one("second"), asyncio.to_thread(find, "thread"))

        copied = copy_context()
        # Threads have a context of their own: Prefect has none there, today or with this import.
        in_thread("bare", find)
        in_thread("copied", copied.run, find)
        asyncio.run(several())
        find("body")
        return found

    found, task_run_id, _ = run(look)
    names = ("copied", "first", "second", "thread", "body")
    assert found == {"bare": None, **dict.fromkeys(names, str(task_run_id))}


def test_a_standby_imports_prefect_for_tasks_that_use_it(late: bool) -> None:
    def look() -> tuple[int, bool]:
        import os
        import sys

        return os.getpid(), "prefect" in sys.modules

    end_sources()
    work = task(tags=SMALL)(look)

    @flow(task_runner=GPUTaskRunner(devices="host", standby=1, start_method="spawn", reports=False))
    def two() -> Any:
        work.submit().result()
        assert eventually(lambda: standby_pool().ready_by_kind.total() == 1)
        (waiting,) = standby_pool().pids
        return waiting, *work.submit().result()

    waiting, pid, imported = two()
    assert waiting == pid and imported is not late


def test_a_fork_of_the_body_may_import_prefect_too(late: bool) -> None:
    def fork(patience_s: float) -> int:
        import logging
        import multiprocessing

        def work() -> None:
            logging.getLogger("mine").warning("in the fork")
            from prefect.context import get_run_context

            raise SystemExit(0 if get_run_context() else 1)

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join(patience_s)
        process.kill()
        return process.exitcode if process.exitcode is not None else -1

    assert run(fork, DEADLOCK_S)[0] == 0


def test_a_context_that_cannot_be_read_fails_the_import_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look() -> str:
        try:
            import prefect
        except RuntimeError as error:
            return str(error)
        return prefect.__version__

    monkeypatch.setattr(task_plan, "uses_prefect", lambda function: False)
    broken = ChildContext({"x": Bomb()}, {}, {}, log_prints=False)
    monkeypatch.setattr(EngineRun, "context_for_child", lambda self: broken)
    assert run(look)[0] == "it cannot be read"


class Bomb:
    """Cannot be unpickled outside of the tests' own process."""

    def __reduce__(self) -> Any:
        return _explode, (os.getpid(),)


def _explode(pid: int) -> None:
    if os.getpid() != pid:
        raise RuntimeError("it cannot be read")


assert "prefect" in sys.modules, (
    "bodies must not refer to this module: their process would import Prefect"
)

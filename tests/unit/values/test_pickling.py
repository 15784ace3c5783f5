"""What travels by value, what by name, and how what cannot travel is named."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import signal
import sqlite3
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import pytest

from prefect_gpu import values
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import ResultError
from prefect_gpu.processes.messages import Call
from prefect_gpu.values import by_value, made_anew, pickling, stand_ins, transport
from tests.unit.frameworks.policies import import_lazily

SOURCE = """
import threading
class MyError(Exception):
    seen = 0
    def double(self):
        return twice(self.args[0])
def twice(number):
    return 2 * number
def fail(number):
    MyError.seen = 99
    raise MyError(number)
"""


@pytest.fixture
def by_path(tmp_path: Path) -> Iterator[types.ModuleType]:
    """A module as Prefect loads a flow of a deployment: by path, its folder not on `sys.path`."""
    path = tmp_path / "flow_by_path.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("flow_by_path", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flow_by_path"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["flow_by_path"]


class Connected:
    """Has what cannot be pickled."""

    def __init__(self) -> None:
        self.socket = sqlite3.connect(":memory:")


class TwoArguments(Exception):
    def __init__(self, left: str, right: str) -> None:
        super().__init__(left + right)


class KeywordOnly(Exception):
    def __init__(self, code: int, *, host: str) -> None:
        super().__init__(f"{host} answered {code}")
        self.code, self.host = code, host


class Prefixed(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(f"memory: {text}")


class Changeling(Exception):
    def __reduce__(self) -> Any:
        return str, ("no exception",)


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError

    def __reduce__(self) -> Any:
        raise ValueError("stays here")


def test_importable_is_what_a_fresh_interpreter_would_find(by_path: types.ModuleType) -> None:
    assert values.is_importable("json.decoder")
    assert values.is_importable("sys")
    assert not values.is_importable("__main__")
    assert not values.is_importable("flow_by_path")
    assert not values.is_importable("flow_by_path.part")
    assert not values.is_importable("no_such_module")


def test_a_module_by_path_that_hides_an_importable_one_is_not_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    for folder in (tmp_path, tmp_path / "here"):
        (folder / "twin_module.py").write_text("def f(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    module = types.ModuleType("twin_module")
    module.__file__ = str(tmp_path / "twin_module.py")
    monkeypatch.setitem(sys.modules, "twin_module", module)
    assert not values.is_importable("twin_module")
    # Loaded again under the same name, from where it would be found.
    other = types.ModuleType("twin_module")
    other.__file__ = str(tmp_path / "here" / "twin_module.py")
    monkeypatch.setitem(sys.modules, "twin_module", other)
    assert values.is_importable("twin_module")


def test_only_what_no_import_can_find_travels_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    # Libraries make modules by hand in their own packages (pybind11): their classes are known by name.
    monkeypatch.setitem(sys.modules, "json.made_by_hand", types.ModuleType("json.made_by_hand"))
    of_library = type("OfLibrary", (), {"__module__": "json.made_by_hand"})
    of_script = type("OfScript", (), {"__module__": "__main__"})
    gone = type("Gone", (), {"__module__": "no_such_module"})
    assert [values.travels_by_value(each) for each in (of_library, of_script, gone, int)] == [
        False,
        True,
        True,
        False,
    ]


def test_a_module_that_loads_itself_late_is_importable_and_sent_without_being_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_module.py").write_text("import sys\nsys.lazy_module_was_loaded = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    lazy = import_lazily("lazy_module", monkeypatch)
    monkeypatch.setattr(sys, "lazy_module_was_loaded", False, raising=False)
    assert values.is_importable("lazy_module")
    data = values.dumps([lazy], "call", "call")
    assert not sys.lazy_module_was_loaded  # type: ignore[attr-defined]
    assert values.loads(data, "call") == [lazy]


def test_odd_objects_in_sys_modules_and_finders_that_fail_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Odd:
        __slots__ = ()

        def find_spec(self, *args: object) -> None:
            raise RuntimeError

    monkeypatch.setitem(sys.modules, "no_module", Odd())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "made_by_hand", types.ModuleType("made_by_hand"))
    monkeypatch.setattr(sys, "meta_path", [Odd(), object(), *sys.meta_path])
    assert not values.is_importable("no_module")
    assert not values.is_importable("made_by_hand")


def test_functions_and_modules_by_path_travel_by_value(by_path: types.ModuleType) -> None:
    data = values.dumps((by_path.twice, by_path), "call", "call")
    del sys.modules["flow_by_path"]
    try:
        twice, module = values.loads(data, "call")
        assert twice(4) == 8
        assert module.twice(5) == 10
    finally:
        sys.modules["flow_by_path"] = by_path


def test_code_keeps_its_file_with_a_cloudpickle_that_leaves_it_out(
    by_path: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]

    def reduce_without_file(code: types.CodeType) -> Any:
        # As cloudpickle 3.1.3 does.
        make, parts = reduce_code(code)
        return make, tuple("<dynamic-code>" if part == code.co_filename else part for part in parts)

    monkeypatch.setitem(
        cloudpickle.Pickler.dispatch_table.maps[0], types.CodeType, reduce_without_file
    )
    packed = values.dumps(by_path.twice, "argument", "twice")
    assert values.loads(packed, "argument").__code__.co_filename == by_path.__file__


def test_importable_functions_travel_by_name() -> None:
    data = values.dumps(pickle.dumps, "call", "call")
    assert len(data.open().stream) < 60


def test_a_class_that_came_with_the_call_goes_back_as_the_parents_own(
    by_path: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its identity nor its attributes change: `except MyError` holds in the flow."""
    monkeypatch.setattr(by_value, "_from_flow", weakref.WeakSet())
    monkeypatch.setattr(by_value, "_finished", weakref.WeakSet())
    fail = values.load_call(values.dumps(by_path.fail, "call", "call"))
    # Of the parent's own, in this one process: loading the call set it anew.
    method = by_path.MyError.double
    with pytest.raises(Exception, match="3") as caught:
        fail(3)
    by_path.MyError.seen = 1
    back = values.loads(values.dump_exception(caught.value), "exception")
    assert type(back) is by_path.MyError
    assert by_path.MyError.seen == 1
    assert by_path.MyError.double is method
    assert back.double() == 6


def test_reducers_are_asked_for_what_is_no_class_and_no_function() -> None:
    def reduce(value: object) -> Any:
        return (str, ("host copy",)) if isinstance(value, Connected) else NotImplemented

    assert values.loads(values.dumps([Connected(), 1], "it", "it", (reduce,)), "it") == [
        "host copy",
        1,
    ]


@pytest.mark.parametrize("depth", [0, 3, 20])
def test_the_path_to_what_cannot_be_pickled_is_bounded(depth: int) -> None:
    value: Any = sqlite3.connect(":memory:")
    for _ in range(depth):
        value = [value]
    with pytest.raises(ResultError) as caught:
        values.dumps(value, "return value", "result")
    assert caught.value.where == "result" + "[0]" * min(depth, 8)
    assert caught.value.type_name == ("builtins.list" if depth > 8 else "sqlite3.Connection")


@pytest.mark.parametrize(
    "value", [threading.Lock(), threading.RLock(), threading.Event(), threading.Semaphore()]
)
def test_a_lock_is_refused_as_an_argument_where_a_new_one_would_guard_nothing(
    value: object,
) -> None:
    with pytest.raises(ResultError, match=r"use multiprocessing.Manager\(\).[A-Z]"):
        values.dumps(value, "return value", "result")


def test_an_exception_that_cannot_travel_arrives_as_its_description() -> None:
    told = back(Wordless())
    assert isinstance(told, ResultError)
    assert "Wordless" in str(told) and "whose text cannot be had" in str(told)
    assert len(str(told)) < 2000


def back(error: BaseException) -> BaseException:
    return values.loads(values.dump_exception(error), "exception")  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "error",
    [
        TwoArguments("left", "right"),
        Changeling("was one"),
        Prefixed("low"),
        OSError(2, "no such file", "/x"),
        SystemExit(3),
        ImportError("no", name="n", path="p"),
        json.JSONDecodeError("bad", "text", 2),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_arrives_with_type_text_arguments_and_attributes(error: Any) -> None:
    arrived: Any = back(error)
    assert type(arrived) is type(error)
    assert (str(arrived), arrived.args) == (str(error), error.args)
    for name in {*vars(error), "code", "errno", "filename", "name", "path"}:
        assert getattr(arrived, name, None) == getattr(error, name, None), name


def test_cause_context_and_notes_arrive() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904
    except ValueError as error:
        told = RuntimeError("third")
        told.__cause__ = error
        told.__notes__ = ["said"]  # type: ignore[attr-defined]
    arrived: Any = back(told)
    assert arrived.__notes__ == ["said"]
    assert repr(arrived.__cause__) == "ValueError('second')"
    assert repr(arrived.__cause__.__context__) == "KeyError('first')"


def test_bytes_that_are_no_value_are_an_error() -> None:
    with pytest.raises(ResultError, match="cannot be rebuilt"):
        values.loads(transport.pack([memoryview(b"nonsense")], ()), "return value")


def test_what_travels_apart_is_read_on_request_and_its_buffers_travel_beside_the_stream() -> None:
    large = pytest.importorskip("numpy").arange(100_000)

    def sent(context: dict[str, Any]) -> Any:
        apart = values.Apart.of(context, "call", "context")
        assert len(apart.stream) < 10_000
        return values.loads(values.dumps(Call(len, (), {}, apart), "call", "call"), "call")

    call = sent({"large": large, "it": Unreadable()})
    with pytest.raises(LookupError, match="it is read"):
        call.read_context()
    assert (sent({"large": large}).read_context()["large"] == large).all()


def test_a_context_gets_the_parameters_of_its_task_and_its_flow_back() -> None:
    context = {"flow_run_context": {"parameters": {}}, "task_run_context": {"parameters": {}}}
    large = ["a list"]
    apart = values.Apart.of(context, "call", "context")
    call = Call(len, (large,), {}, apart, {"x": 1}, parameters={"y": large})
    call = values.loads(values.dumps(call, "call", "call"), "call")
    assert call.read_context() == {
        "flow_run_context": {"parameters": {"x": 1}},
        "task_run_context": {"parameters": {"y": large}},
    }
    assert call.read_context()["task_run_context"]["parameters"]["y"] is call.args[0]
    assert Call(len, (), {}).read_context() == {}


class Unreadable:
    def __reduce__(self) -> Any:
        return _read, ()


def _read() -> None:
    raise LookupError("it is read")


class OfSideTable:
    """Its state is elsewhere, as that of types in C is."""

    held: ClassVar[dict[int, int]] = {}

    def __getstate__(self) -> Any:
        return {"v": OfSideTable.held[id(self)]}

    def __setstate__(self, state: Any) -> None:
        OfSideTable.held[id(self)] = state["v"]


SIDE = OfSideTable()
UNSET = object()
NOTHING = None


def test_only_an_object_without_any_state_is_the_one_of_its_name() -> None:
    OfSideTable.held[id(SIDE)] = 42
    arrived, unset = values.loads(values.dumps([SIDE, UNSET], "argument", "x"), "argument")
    assert OfSideTable.held[id(arrived)] == 42
    assert unset is UNSET


def test_a_long_chain_of_errors_with_what_cannot_be_sent_arrives() -> None:
    error: Any = ValueError(sqlite3.connect(":memory:"))
    for number in range(40):
        following: Any = KeywordOnly(number, host="h")
        following.connection = sqlite3.connect(":memory:")
        following.__cause__ = error
        error = following
    arrived: Any = back(error)
    assert any("Attribute 'connection' was left out" in note for note in arrived.__notes__)
    for number in range(39, -1, -1):
        assert (type(arrived), arrived.code, arrived.host) == (KeywordOnly, number, "h")
        assert not hasattr(arrived, "connection")
        arrived = arrived.__cause__
    assert "sqlite3.Connection object" in str(arrived)


def test_a_name_that_holds_none_is_there_for_a_process_that_asks() -> None:
    assert values.attribute(__name__, "NOTHING").load() is None
    with pytest.raises(AttributeError):
        values.attribute(__name__, "no_such_name")


def test_a_large_object_of_a_module_is_not_copied_to_see_whether_it_can_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numpy = pytest.importorskip("numpy")
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "BIG", numpy.zeros(1 << 20), raising=False)
    script = types.ModuleType("__main__")
    exec("def body():\n return BIG.nbytes", vars(script))
    vars(script)["BIG"] = vars(module)["BIG"]
    monkeypatch.setitem(sys.modules, "__main__", script)
    output = values.check(vars(script)["body"], "function", "body")
    assert [buffer.nbytes for buffer in output.buffers] == [8 << 20]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("cannot be sent")


def test_an_error_of_pickling_is_told_once() -> None:
    with pytest.raises(ResultError) as caught:
        pickling.check(Unpicklable(), "argument", "x", depth=0)
    cause = caught.value.__cause__
    assert isinstance(cause, TypeError) and cause.__context__ is None


def test_a_name_is_asked_of_the_source_that_was_there_although_the_task_ends_meanwhile() -> None:
    class Ends(set[tuple[str, str]]):
        def add(self, key: tuple[str, str]) -> None:
            super().add(key)
            stand_ins.set_source(None)

    stand_ins.set_source(lambda module, name: 42)
    stand_ins._asking.by_thread.names = Ends()
    try:
        assert stand_ins.fetch("a module", "a name") == 42
    finally:
        del stand_ins._asking.by_thread.names
        stand_ins.set_source(None)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="`cached_property` has no lock any more")
def test_names_are_found_in_a_fork_while_another_thread_finds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on, held = threading.Event(), threading.Event(), made_anew._held

    def wait(modules: Any) -> Any:
        begun.set()
        go_on.wait(DEADLOCK_S)
        return held(modules)

    monkeypatch.setattr(made_anew, "_held", wait)
    thread = threading.Thread(target=lambda: made_anew.NamedObjects(False)._name_of(object()))
    thread.start()
    assert begun.wait(DEADLOCK_S)
    monkeypatch.setattr(made_anew, "_held", held)
    pid = os.fork()
    if pid == 0:
        # Pytest's own handler would go on with the tests in the fork.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        made_anew.NamedObjects(False)._name_of(object())
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    go_on.set()
    thread.join(DEADLOCK_S)
    assert status == 0

"""What is read of an interpreter and applied in another one, as values."""

from __future__ import annotations

import logging
import pickle
import re
import sys
import types
import warnings
from collections.abc import Iterator

import pytest

from prefect_gpu.processes import interpreter
from prefect_gpu.processes.interpreter import InterpreterState, LoggerState, WarningFilter


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Keep filters and loggers of this process."""
    known = dict(logging.root.manager.loggerDict)
    with warnings.catch_warnings():
        yield
    logging.root.manager.loggerDict = known


def test_a_state_needs_no_module_of_the_users_to_be_unpickled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OwnWarning(UserWarning):
        pass

    module = types.ModuleType("of_a_script")
    monkeypatch.setitem(sys.modules, "of_a_script", module)
    OwnWarning.__module__, OwnWarning.__qualname__ = "of_a_script", "OwnWarning"
    module.OwnWarning = OwnWarning  # type: ignore[attr-defined]
    warnings.simplefilter("ignore", OwnWarning)
    warnings.filters.insert(0, ("ignore", lambda: None, UserWarning, None, 0))  # type: ignore[attr-defined]
    data = pickle.dumps(InterpreterState.read())
    monkeypatch.delitem(sys.modules, "of_a_script")
    state = pickle.loads(data)
    first = WarningFilter("ignore", None, ("of_a_script", "OwnWarning"), None, 0)
    assert state.filters[0] == first, "what is no filter of `warnings` is left out"
    action, _, category, _, _ = first.item()
    assert action == "ignore" and issubclass(OwnWarning, category)
    assert not issubclass(UserWarning, category)
    assert issubclass(OwnWarning, pickle.loads(pickle.dumps(category)))
    monkeypatch.setitem(sys.modules, "of_a_script", module)
    assert first.item()[2] is OwnWarning


def test_a_key_is_not_shown() -> None:
    state = InterpreterState.read()
    assert state.authkey and repr(state.authkey) not in repr(state)


def test_filters_of_libraries_of_the_child_alone_come_first() -> None:
    mine = WarningFilter("always", re.compile("a.*"), ("builtins", "Warning"), None, 3)
    of_library = ("ignore", re.compile("size changed"), RuntimeWarning, None, 0)
    warnings.filters[:] = [of_library, mine.item(), *interpreter._FIRST_FILTERS]  # type: ignore[index]
    state = InterpreterState(b"", "", None, {}, (mine,), (), 0)
    state.apply_before_body()
    assert warnings.filters == [of_library, mine.item()]


def test_a_warning_of_an_import_is_not_raised(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "warns_here.py").write_text("import warnings; warnings.warn('at import')")  # type: ignore[operator]
    monkeypatch.syspath_prepend(tmp_path)
    raising = WarningFilter("error", None, ("builtins", "UserWarning"), None, 0)
    ignoring = WarningFilter("ignore", None, ("builtins", "UserWarning"), None, 0)
    InterpreterState(b"", "", None, {}, (raising, ignoring), (), 0).apply_before_body()
    __import__("warns_here")
    monkeypatch.delitem(sys.modules, "warns_here")
    with pytest.raises(UserWarning, match="in the body"):
        warnings.warn("in the body", stacklevel=1)


def test_loggers_are_read_and_set() -> None:
    class Own(logging.Logger):
        pass

    logging.root.manager.loggerDict["of_a_test.own"] = own = Own("of_a_test.own", logging.ERROR)
    logging.getLogger("of_a_test.unset")
    logging.getLogger("of_a_test.quiet").propagate = False
    logging.getLogger("of_a_test.off").disabled = True
    found = {each.name: each for each in LoggerState.read_all()}
    assert "of_a_test.unset" not in found and found[""].level == logging.root.level
    assert found["of_a_test.own"] == LoggerState("of_a_test.own", 40, True, False, False)
    for name in ("own", "quiet", "off"):
        del logging.root.manager.loggerDict[f"of_a_test.{name}"]
        found[f"of_a_test.{name}"].apply()
    assert not logging.getLogger("of_a_test.quiet").propagate
    assert logging.getLogger("of_a_test.off").disabled
    # Its library makes it, of its own class.
    assert "of_a_test.own" not in logging.root.manager.loggerDict
    logging.root.manager.loggerDict["of_a_test.own"] = own
    own.setLevel(0)
    found["of_a_test.own"].apply()
    assert own.level == logging.ERROR

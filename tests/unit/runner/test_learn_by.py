from __future__ import annotations

import datetime
import decimal
import enum
import uuid
from collections import namedtuple
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, SecretStr

from prefect_gpu.errors import PolicyError
from prefect_gpu.reports.history import history_artifact_key
from prefect_gpu.runner.learn_by import NODE_LIMIT, WORDS_LIMIT, describe_values, digest_values
from prefect_gpu.scheduling.history import HistoryKey


class Size(enum.Enum):
    SMALL = 1
    LARGE = 2


class Other(enum.Enum):
    SMALL = 1


class Parts(enum.Flag):
    HEAD = 1
    BODY = 2


@dataclass
class Shape:
    width: int
    layers: list[int] = field(default_factory=list)


@dataclass
class ArrayLike:
    """Has what arrays have, and more."""

    dtype: str
    shape: tuple[int, ...]
    batch: int


class Options(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())
    batch: int = 1
    size: Size = Size.SMALL


class Model:
    def __init__(self, width: int) -> None:
        self.width = width


class device:
    """Called as `torch.device`, but a class of the user's."""


Pair = namedtuple("Pair", "left right")


def body(model: Any, batch: Any = 32, *rest: Any, precision: str = "fp16") -> None:
    """A task's function."""


def loose(model: Any, **options: Any) -> None:
    """A task's function that takes anything."""


def digest(value: Any) -> str:
    return digest_values(body, ["model"], {"model": value})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(32, 32.0, id="a whole number however it is written"),
        pytest.param(32, np.int64(32), id="a number of NumPy's"),
        pytest.param(0.5, np.float64(0.5), id="a fraction of NumPy's"),
        pytest.param(True, np.bool_(True), id="a truth value of NumPy's"),
        pytest.param("a", np.str_("a"), id="text of NumPy's"),
        pytest.param("/data/a", Path("/data/a"), id="a path and its text"),
        pytest.param([1, 2], (1, 2), id="a tuple and a list"),
        pytest.param((1, 2), Pair(1, 2), id="a named tuple"),
        pytest.param({"a": 1, "b": 2}, {"b": 2, "a": 1}, id="a dict in another order"),
        pytest.param({"a", "b", "c"}, frozenset(["c", "b", "a"]), id="a set in another order"),
        pytest.param({1, "1"}, {"1", 1}, id="a set of several kinds"),
        pytest.param(Shape(3, [1]), Shape(3, [1]), id="equal dataclasses"),
        pytest.param(Options(batch=2, x=1), Options(x=1, batch=2), id="equal models"),
        pytest.param(Parts.HEAD | Parts.BODY, Parts(3), id="combined flags"),
        pytest.param(float("nan"), float("nan"), id="no number"),
        pytest.param(np.zeros((2, 3)), np.ones((2, 3)), id="arrays of one shape"),
        pytest.param(Model(1), Model(2), id="objects of an unknown class"),
        pytest.param(device(), device(), id="objects that are called like a library's"),
        pytest.param(lambda: 1, lambda: 2, id="nameless functions of one place"),
        pytest.param(np.dtype("f4"), np.dtype("float32"), id="equal dtypes"),
    ],
)
def test_what_is_equal_shares_a_history(one: Any, other: Any) -> None:
    assert digest(one) == digest(other)


DIFFERENT = [
    None,
    True,
    False,
    0,
    1,
    -1,
    10**5000,
    0.5,
    float("inf"),
    2j,
    "",
    "1",
    "a",
    "\ud800",
    b"1",
    [],
    [1],
    [1, 2],
    [2, 1],
    [[1], 2],
    {},
    {"a": 1},
    {"a": 2},
    {1: 1},
    set(),
    {1},
    {1, 2},
    range(2),
    range(3),
    Size.SMALL,
    Size.LARGE,
    Other.SMALL,
    Parts.HEAD,
    Parts.HEAD | Parts.BODY,
    Shape(1),
    Shape(2),
    Shape(1, [1]),
    ArrayLike("f4", (1,), 1),
    ArrayLike("f4", (1,), 2),
    Options(),
    Options(batch=2),
    Options(batch=2, extra=1),
    Model,
    Model(1),
    Shape,
    len,
    max,
    body,
    PurePosixPath("/data/b"),
    datetime.date(2026, 11, 20),
    datetime.datetime(2026, 11, 20),
    datetime.timedelta(1),
    datetime.timedelta(2),
    decimal.Decimal("0.5"),
    uuid.UUID(int=1),
    uuid.UUID(int=2),
    np.zeros(3),
    np.zeros(4),
    np.zeros((3, 1)),
    np.zeros(3, "f4"),
    np.float32,
    np.dtype("f4"),
    np.dtype("f8"),
    np.datetime64("2026-11-21"),
]


def test_what_differs_has_histories_of_its_own() -> None:
    digests: dict[str, Any] = {}
    for value in DIFFERENT:
        assert digests.setdefault(digest(value), value) is value


def test_arrays_of_frameworks_count_by_dtype_and_shape() -> None:
    torch = pytest.importorskip("torch")
    assert digest(torch.zeros(2, 3)) == digest(torch.ones(2, 3))
    others = [
        torch.zeros(2, 3),
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.float16),
        torch.float16,
        torch.bfloat16,
        torch.device("cpu"),
        torch.device("meta"),
        torch.optim.SGD,
        torch.optim.Adam,
    ]
    assert len({digest(value) for value in others}) == len(others)


@given(st.dictionaries(st.text(), st.one_of(st.integers(), st.floats(), st.text(), st.none())))
def test_the_order_of_a_dict_does_not_count(values: dict[str, Any]) -> None:
    assert digest(values) == digest(dict(reversed(list(values.items()))))


def test_a_list_that_holds_itself_has_a_digest() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert digest(endless) == digest(endless) != digest([1])


def test_the_module_that_a_class_is_found_in_does_not_count() -> None:
    digests = set()
    for module in ("__main__", "flows.evaluate", "__prefect_loader_1__"):
        shape = make_dataclass("Shape", ["width"], namespace={"__module__": module})
        size = enum.Enum("Size", ["SMALL"], module=module)
        digests.add(digest([shape(3), size.SMALL, shape]))
    assert len(digests) == 1


def test_a_digest_is_the_same_in_every_process_and_version() -> None:
    # Python seeds the order of sets of text anew in each process. A change begins all histories that
    # use `gpu:learn_by` anew: not without a reason.
    value = {"a": [1, 0.5, True, None, "x", b"y", Size.SMALL, set("abcdefgh")], "b": Shape(3, [1])}
    assert digest(value) == "19a87b094dec"


def test_a_digest_is_short_and_hexadecimal() -> None:
    assert len(digest(1)) == 12 and int(digest(1), 16) >= 0


def test_no_names_no_digest() -> None:
    assert digest_values(body, [], {"model": 1}) == ""


def test_only_named_parameters_count_in_any_order() -> None:
    values = {"model": "a", "batch": 8, "precision": "fp32"}
    both = digest_values(body, ["batch", "model"], values)
    assert both == digest_values(body, ("model", "batch", "model"), {**values, "precision": "x"})
    assert both != digest_values(body, ["model", "precision"], values)
    assert both != digest_values(body, ["batch", "model"], {**values, "model": 8, "batch": "a"})


def test_a_default_counts_as_if_it_were_given() -> None:
    names = ["batch", "precision"]
    given = {"model": 1, "batch": 32, "precision": "fp16"}
    assert digest_values(body, names, {"model": 1}) == digest_values(body, names, given)
    assert digest_values(body, names, {"model": 1, "batch": 64}) != digest_values(
        body, names, given
    )


def test_an_argument_that_is_missing_differs_from_none() -> None:
    # The call itself fails later, with Python's own words.
    assert digest_values(body, ["model"], {}) != digest(None)


def test_names_among_further_keywords_are_found() -> None:
    def of(options: dict[str, Any]) -> str:
        return digest_values(loose, ["batch"], {"model": 1, "options": options})

    assert of({"batch": 1}) == of({"batch": 1, "other": 2})
    assert len({of({"batch": 1}), of({"batch": 2}), of({"batch": None}), of({})}) == 4
    assert of({}) == digest_values(loose, ["batch"], {"model": 1})


def test_an_unknown_parameter_is_the_authors_to_correct() -> None:
    with pytest.raises(PolicyError) as caught:
        digest_values(body, ["model", "batchsize"], {"model": 1})
    assert str(caught.value) == (
        "gpu:learn_by=batchsize: body() has no parameter 'batchsize'; "
        "did you mean gpu:learn_by=batch?; accepted: model, batch, precision"
    )


def test_a_function_without_parameters_says_so() -> None:
    with pytest.raises(PolicyError) as caught:
        digest_values(lambda: None, ["batch"], {})
    assert "accepted: none, since it has no parameters" in str(caught.value)


def test_a_dict_that_holds_itself_many_times_has_a_digest_soon() -> None:
    circle: dict[int, Any] = {}
    circle.update(dict.fromkeys(range(10), circle))
    assert digest(circle) == digest(circle) != digest({})


def test_what_is_shared_over_and_over_counts_by_its_class() -> None:
    shared: list[Any] = [1]
    for _ in range(25):
        shared = [shared, shared]
    assert digest(shared) == digest([0] * (NODE_LIMIT + 1))


def test_what_is_shared_a_little_counts_each_time() -> None:
    one = [1]
    assert digest([one, one]) == digest([[1], [1]])


def evaluate(batch_size: int, model: str = "vit-b16", api_token: Any = "", **more: Any) -> None: ...


@pytest.mark.parametrize(
    ("names", "arguments", "words"),
    [
        (["model", "batch_size"], {"batch_size": 32, "model": "b16"}, "batch_size=32, model=b16"),
        (["api_token"], {"api_token": "hf_1234"}, "api_token=(secret)"),
        (["model"], {"model": "s3://me:word@host/x"}, "model=(secret)"),
        (["model"], {"model": Size.SMALL}, "model=SMALL"),
        (["model"], {"model": [8, None, "a"]}, "model=[8, None, a]"),
        (["model"], {"model": np.dtype("float16")}, "model=float16"),
        (["model"], {"model": np.zeros(3)}, "model=ndarray"),
        (["model"], {"model": SecretStr("hunter2")}, "model=SecretStr"),
        (["width"], {"more": {"width": 1.5}}, "width=1.5"),
        (["width"], {"more": {}}, ""),
        (["model"], {"model": 10**5000}, "model=int"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
def test_values_are_said_as_the_user_wrote_them_unless_they_are_secret(
    names: list[str], arguments: dict[str, Any], words: str
) -> None:
    assert describe_values(evaluate, names, arguments) == words


@pytest.mark.parametrize(
    "name",
    ["bearer", "session_cookie", "pwd", "dbPwd", "passphrase", "passcode", "db_pass", "jwt", "ssh_key", "signing_key", "dsn"],
)  # fmt: skip
def test_a_parameter_with_the_name_of_a_secret_is_not_written(name: str) -> None:
    def body(**values: str) -> None: ...

    assert describe_values(body, [name], {"values": {name: "abc"}}) == f"{name}=(secret)"


@pytest.mark.parametrize("name", ["passes", "model", "key", "keys", "bypass_cache", "order"])
def test_other_parameters_are_written(name: str) -> None:
    def body(**values: str) -> None: ...

    assert describe_values(body, [name], {"values": {name: "abc"}}) == f"{name}=abc"


def test_a_text_that_is_an_authorization_header_is_not_written() -> None:
    def body(header: str) -> None: ...

    assert describe_values(body, ["header"], {"header": "Bearer abc"}) == "header=(secret)"


def test_words_for_values_are_short_and_begin_no_other_history() -> None:
    long = describe_values(evaluate, ["model"], {"model": "x" * 10_000})
    assert len(long) == WORDS_LIMIT
    deep: list[Any] = []
    deep.append(deep)
    assert describe_values(evaluate, ["model"], {"model": deep}).startswith("model=[")
    said, unsaid = (
        HistoryKey("t", "t", "H200", "ab", "model=b16"),
        HistoryKey("t", "t", "H200", "ab"),
    )
    assert said == unsaid and history_artifact_key(said) == history_artifact_key(unsaid)

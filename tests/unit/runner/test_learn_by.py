"""Values that `gpu:learn_by` names: which share a history, which are refused, and what is written of them."""

from __future__ import annotations

import datetime
import decimal
import enum
import uuid
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, SecretStr

from prefect_gpu.errors import PolicyError
from prefect_gpu.reports.history import history_artifact_key
from prefect_gpu.runner import task_plan
from prefect_gpu.runner.task_plan import ACCEPTED, DEPTH_LIMIT, read_learn_by
from prefect_gpu.scheduling.history import HistoryKey
from tests.cases import cases


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


class Options(BaseModel):
    batch: int = 1


Pair = namedtuple("Pair", "left right")


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"/data"


def body(model: Any, batch: Any = 32, *rest: Any, precision: str = "fp16") -> None:
    """A task's function."""


def loose(model: Any, **options: Any) -> None:
    """A task's function that takes anything."""


def digest(value: Any) -> str:
    return read_learn_by(body, ["model"], {"model": value}).digest


@cases(
    "one, other",
    {
        "a whole number however it is written": (32, 32.0),
        "a number of NumPy's": (32, np.int64(32)),
        "a fraction of NumPy's": (0.5, np.float64(0.5)),
        "text of NumPy's": ("a", np.str_("a")),
        "a path and its text": ("/data/a", Path("/data/a")),
        "a tuple and a list": ([1, 2], (1, 2)),
        "a named tuple": ((1, 2), Pair(1, 2)),
        "combined flags": (Parts.HEAD | Parts.BODY, Parts(3)),
        "no number": (float("nan"), float("nan")),
    },
)
def test_what_is_equal_shares_a_history(one: Any, other: Any) -> None:
    assert digest(one) == digest(other)


DIFFERENT = [
    *(None, True, False, 0, 1, -1, 10**5000, 0.5, float("inf"), "", "1", "a", "\ud800"),
    *([], [1], [1, 2], [2, 1], [[1], 2]),
    *(Size.SMALL, Size.LARGE, Other.SMALL, Parts.HEAD, Parts.HEAD | Parts.BODY),
    PurePosixPath("/data/b"),
]


def test_what_differs_has_histories_of_its_own() -> None:
    digests: dict[str, Any] = {}
    for value in DIFFERENT:
        assert digests.setdefault(digest(value), value) is value


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.zeros(3), "numpy.ndarray"),
        (np.dtype("f4"), "numpy.dtypes.Float32DType"),
        (np.datetime64("2026-11-21"), "numpy.datetime64"),
        (Shape(1), f"{__name__}.Shape"),
        (Options(), f"{__name__}.Options"),
        (Shape, "type"),
        (len, "builtin_function_or_method"),
        ({"a": 1}, "dict"),
        ({1}, "set"),
        (b"1", "bytes"),
        (2j, "complex"),
        (range(2), "range"),
        (BytesPath(), f"{__name__}.BytesPath"),
        (decimal.Decimal("0.5"), "decimal.Decimal"),
        (datetime.date(2026, 11, 20), "datetime.date"),
        (uuid.UUID(int=1), "uuid.UUID"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_values_are_refused_by_parameter_and_type(value: Any, kind: str) -> None:
    with pytest.raises(PolicyError) as caught:
        digest(value)
    assert str(caught.value) == (
        f"gpu:learn_by=model: model is of type {kind}; accepted: {ACCEPTED}"
    )


def test_a_value_inside_a_tuple_is_refused_by_its_place() -> None:
    with pytest.raises(PolicyError, match=r"gpu:learn_by=model: model\[1\]\[0\] is of type dict;"):
        digest((1, [{}]))


def test_tensors_and_dtypes_of_pytorch_are_refused_and_a_shape_is_a_tuple() -> None:
    torch = pytest.importorskip("torch")
    for value in (torch.zeros(2, 3), torch.float16, torch.device("cpu")):
        with pytest.raises(PolicyError, match=rf"model is of type torch\.{type(value).__name__};"):
            digest(value)
    assert digest(torch.zeros(2, 3).shape) == digest((2, 3))


def test_a_refused_secret_is_not_in_the_message() -> None:
    with pytest.raises(PolicyError) as caught:
        digest(SecretStr("hunter2"))
    assert "SecretStr" in str(caught.value) and "hunter2" not in str(caught.value)


def test_a_list_that_holds_itself_is_refused_as_one_that_is_too_deep_is() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    deep: Any = 1
    for _ in range(DEPTH_LIMIT):
        deep = (deep,)
    assert digest(deep)
    for value in (endless, (deep,)):
        with pytest.raises(PolicyError, match=f"at most {DEPTH_LIMIT} deep"):
            digest(value)


def test_the_module_that_an_enum_is_found_in_does_not_count() -> None:
    modules = ("__main__", "flows.evaluate", "__prefect_loader_1__")
    found = {digest(enum.Enum("Size", ["SMALL"], module=module).SMALL) for module in modules}  # type: ignore[attr-defined]
    assert len(found) == 1


def test_a_digest_is_the_same_in_every_process_and_version() -> None:
    # A change begins all histories that use `gpu:learn_by` anew: not without a reason.
    parts = Parts.HEAD | Parts.BODY
    value = [1, 0.5, True, None, "x", Size.SMALL, parts, (2, ("y",)), Path("/data/a")]
    assert digest(value) == "21bf8e7cc4bd"


def test_only_named_parameters_count_in_any_order() -> None:
    values = {"model": "a", "batch": 8, "precision": "fp32"}
    both = read_learn_by(body, ["batch", "model"], values).digest
    assert (
        both
        == read_learn_by(body, ("model", "batch", "model"), {**values, "precision": "x"}).digest
    )
    assert both != read_learn_by(body, ["model", "precision"], values).digest
    assert (
        both != read_learn_by(body, ["batch", "model"], {**values, "model": 8, "batch": "a"}).digest
    )


def test_names_among_further_keywords_are_found() -> None:
    def of(options: dict[str, Any]) -> str:
        return read_learn_by(loose, ["batch"], {"model": 1, "options": options}).digest

    assert of({"batch": 1}) == of({"batch": 1, "other": 2})
    assert len({of({"batch": 1}), of({"batch": 2}), of({"batch": None}), of({})}) == 4


def test_an_unknown_parameter_is_the_authors_to_correct() -> None:
    with pytest.raises(PolicyError) as caught:
        read_learn_by(body, ["model", "batchsize"], {"model": 1})
    assert str(caught.value) == (
        "gpu:learn_by=batchsize: body() has no parameter 'batchsize'; "
        "did you mean gpu:learn_by=batch?; accepted: model, batch, precision"
    )


def test_a_function_without_parameters_says_so() -> None:
    with pytest.raises(PolicyError) as caught:
        read_learn_by(lambda: None, ["batch"], {})
    assert "accepted: none, since it has no parameters" in str(caught.value)


def evaluate(batch_size: int, model: str = "vit-b16", api_token: Any = "", **more: Any) -> None: ...


@pytest.mark.parametrize(
    ("names", "arguments", "words"),
    [
        (["model", "batch_size"], {"batch_size": 32, "model": "b16"}, "batch_size=32, model=b16"),
        (["api_token"], {"api_token": "hf_1234"}, "api_token=(secret)"),
        (["model"], {"model": "s3://me:word@host/x"}, "model=(secret)"),
        (["model"], {"model": Size.SMALL}, "model=SMALL"),
        (["model"], {"model": [8, None, "a"]}, "model=[8, None, a]"),
        (["model"], {"model": [[8], "s3://me:word@host/x"]}, "model=[[8], (secret)]"),
        (["width"], {"more": {"width": 1.5}}, "width=1.5"),
        (["width"], {"more": {}}, ""),
        (["model"], {"model": 10**5000}, "model=int"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
def test_values_are_said_as_the_user_wrote_them_unless_they_are_secret(
    names: list[str], arguments: dict[str, Any], words: str
) -> None:
    assert read_learn_by(evaluate, names, arguments).words == words


SECRETS = "bearer session_cookie pwd dbPwd passphrase passcode db_pass jwt ssh_key signing_key dsn"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *((name, "abc", "(secret)") for name in SECRETS.split()),
        *(
            (name, "abc", "abc")
            for name in ["passes", "model", "key", "keys", "bypass_cache", "order"]
        ),
        ("header", "Bearer abc", "(secret)"),
    ],
)
def test_a_parameter_with_the_name_or_text_of_a_secret_is_not_written(
    name: str, value: str, words: str
) -> None:
    def body(**values: str) -> None: ...

    assert read_learn_by(body, [name], {"values": {name: value}}).words == f"{name}={words}"


def test_words_for_values_are_short_and_begin_no_other_history() -> None:
    long = read_learn_by(evaluate, ["model"], {"model": "x" * 10_000}).words
    assert len(long) == task_plan.WORDS_LIMIT
    said = HistoryKey("t", "t", "H200", "ab", "model=b16")
    unsaid = HistoryKey("t", "t", "H200", "ab")
    assert said == unsaid and history_artifact_key(said) == history_artifact_key(unsaid)


def lines(names: list[str], **arguments: Any) -> dict[str, Any]:
    """The lines of a call: others' digest and value by parameter."""
    text = read_learn_by(
        evaluate, names, {"batch_size": 8, "model": "b16", "more": {}, **arguments}
    ).lines
    found = HistoryKey("t", "t", learn_by_lines=text).lines
    return {line.parameter: (line.others, line.value) for line in found}


def test_each_number_has_a_line_with_the_calls_that_differ_in_it_only() -> None:
    names = ["batch_size", "model", "width"]
    one = lines(names, batch_size=8, more={"width": 0.5})
    assert {name: value for name, (_, value) in one.items()} == {"batch_size": 8.0, "width": 0.5}
    larger = lines(names, batch_size=16, more={"width": 0.5})
    assert larger["batch_size"] == (one["batch_size"][0], 16.0)
    assert larger["width"][0] != one["width"][0]
    other = lines(names, model="l16", more={"width": 0.5})
    assert other["batch_size"][0] != one["batch_size"][0]
    assert lines(names)["batch_size"][0] != one["batch_size"][0], "it has no width"
    # All that is not named may differ.
    assert lines(["batch_size"], model="l16") == lines(["batch_size"])


@cases(
    "value, number",
    {
        "a whole number": (8, 8.0),
        "a number of NumPy's": (np.int64(8), 8.0),
        "a fraction": (0.25, 0.25),
        "less than zero": (-1, -1.0),
        "true": (True, None),
        "an enum of numbers": (enum.IntEnum("Bits", ["FEW"])(1), None),
        "a text": ("8", None),
        "a list": ([8], None),
        "none": (None, None),
        "not a number": (float("nan"), None),
        "infinite": (float("inf"), None),
        "thousands of digits": (10**5000, None),
    },
)
def test_numbers_have_lines(value: Any, number: float | None) -> None:
    found = lines(["batch_size"], batch_size=value)
    assert [x for _, x in found.values()] == ([] if number is None else [number])


def test_a_secret_number_is_not_written() -> None:
    assert read_learn_by(evaluate, ["api_token"], {"api_token": 1234}).lines == ""
    assert (
        read_learn_by(evaluate, ["max_tokens"], {"more": {"max_tokens": 512}}).words
        == "max_tokens=512"
    )
    assert lines(["max_tokens"], more={"max_tokens": 512})["max_tokens"][1] == 512.0
    listed = {"more": {"api_tokens": ["hf_1"]}}
    assert read_learn_by(evaluate, ["api_tokens"], listed).words == "api_tokens=(secret)"
    assert (
        "1234"
        not in read_learn_by(
            evaluate, ["api_token", "batch_size"], {"api_token": 1234, "batch_size": 8}
        ).lines
    )


def test_as_many_lines_are_kept_as_the_api_takes() -> None:
    names = [f"a_parameter_{n}" for n in range(20)]
    found = lines(names, more=dict.fromkeys(names, 1.5))
    assert 5 < len(found) < 20 and list(found) == sorted(names)[: len(found)]

import pytest

from prefect_gpu.units import GIB
from tests.unit.frameworks.policies import policy


def test_a_cap_is_the_budget_less_the_context():
    capped = policy(allocation="limit", context_bytes={"torch": GIB})
    assert capped.cap_bytes("torch") == (7 * GIB,)
    assert capped.cap_bytes("jax") == (8 * GIB,)


@pytest.mark.parametrize("changes", [{"allocation": "growth"}, {"device_kind": "host"}])
def test_growth_and_host_devices_have_no_cap(changes):
    assert policy(**{"allocation": "limit", **changes}).cap_bytes("torch") is None


@pytest.mark.parametrize(
    ("frameworks", "shares", "caps"),
    [
        (("torch",), {}, {"torch": 8}),
        (("torch", "jax"), {}, {"torch": 4, "jax": 4}),
        (("torch", "jax"), {"torch": 0.75}, {"torch": 6, "jax": 2}),
        (("torch", "jax"), {"torch": 0.75, "jax": 0.25}, {"torch": 6, "jax": 2}),
    ],
    ids=[
        "a single one has it all",
        "named ones divide it equally",
        "one without a share has the rest",
        "each has its share",
    ],
)
def test_shares_of_named_frameworks(frameworks, shares, caps):
    shared = policy(allocation="limit", frameworks=frameworks, shares=shares)
    assert {name: shared.cap_bytes(name)[0] // GIB for name in caps} == caps


@pytest.mark.parametrize(
    ("changes", "caps"),
    [
        ({}, {"torch": 8, "jax": 8}),
        ({"detected": ("torch",)}, {"torch": 8, "jax": 8}),
        ({"detected": ("jax", "torch")}, {"torch": 4, "jax": 4, "cupy": 8}),
        ({"detected": ("jax", "torch"), "frameworks": ("torch",)}, {"torch": 8}),
        (
            {"frameworks": ("torch",), "shares": {"torch": 0.75}},
            {"torch": 6, "jax": 2, "cupy": 2},
        ),
        (
            {
                "frameworks": ("torch", "jax", "cupy"),
                "shares": {"torch": 0.6, "jax": 0.3, "cupy": 0.1},
            },
            {"onnxruntime": 8},
        ),
    ],
    ids=[
        "where none is expected each has all",
        "a detected one has all, and so has one that turns up beside it",
        "detected ones divide it equally",
        "names win over what was detected",
        "one that turns up has what nobody was promised",
        "shares that add up to 1 leave nothing, rounded or not",
    ],
)
def test_shares_of_frameworks_that_are_not_named(changes, caps):
    shared = policy(allocation="limit", **changes)
    assert {name: shared.cap_bytes(name)[0] // GIB for name in caps} == caps


@pytest.mark.parametrize("expected", ["frameworks", "detected"])
def test_caps_and_contexts_of_expected_frameworks_add_up_to_the_budget_at_most(expected):
    contexts = {"torch": GIB, "jax": GIB // 2, "tensorflow": GIB // 4}
    shared = policy(allocation="limit", context_bytes=contexts, **{expected: tuple(contexts)})
    total = sum(shared.cap_bytes(name)[0] + context for name, context in contexts.items())
    assert 8 * GIB - 3 <= total <= 8 * GIB

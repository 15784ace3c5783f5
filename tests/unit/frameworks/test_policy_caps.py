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


NAMED = {"frameworks": ("torch", "jax")}
DETECTED = {"detected": ("jax", "torch")}
MOST = {"torch": 0.75}
SHARES = {
    "a single one has it all": ({"frameworks": ("torch",)}, {"torch": 8}),
    "named ones divide it equally": (NAMED, {"torch": 4, "jax": 4}),
    "one without a share has the rest": (NAMED | {"shares": MOST}, {"torch": 6, "jax": 2}),
    "each has its share": (NAMED | {"shares": MOST | {"jax": 0.25}}, {"torch": 6, "jax": 2}),
    "where none is expected each has all": ({}, {"torch": 8, "jax": 8}),
    "a detected one has all, and so has one that turns up beside it": (
        {"detected": ("torch",)},
        {"torch": 8, "jax": 8},
    ),
    "detected ones divide it equally": (DETECTED, {"torch": 4, "jax": 4, "cupy": 8}),
    "names win over what was detected": (DETECTED | {"frameworks": ("torch",)}, {"torch": 8}),
    "one that turns up has what nobody was promised": (
        {"frameworks": ("torch",), "shares": MOST},
        {"torch": 6, "jax": 2, "cupy": 2},
    ),
    "shares that add up to 1 leave nothing, rounded or not": (
        {"frameworks": ("torch", "jax", "cupy"), "shares": {"torch": 0.6, "jax": 0.3, "cupy": 0.1}},
        {"onnxruntime": 8},
    ),
}


@pytest.mark.parametrize(("changes", "caps"), SHARES.values(), ids=list(SHARES))
def test_shares(changes, caps):
    shared = policy(allocation="limit", **changes)
    assert {name: shared.cap_bytes(name)[0] // GIB for name in caps} == caps


@pytest.mark.parametrize("expected", ["frameworks", "detected"])
def test_caps_and_contexts_of_expected_frameworks_add_up_to_the_budget_at_most(expected):
    contexts = {"torch": GIB, "jax": GIB // 2, "tensorflow": GIB // 4}
    shared = policy(allocation="limit", context_bytes=contexts, **{expected: tuple(contexts)})
    total = sum(shared.cap_bytes(name)[0] + context for name, context in contexts.items())
    assert 8 * GIB - 3 <= total <= 8 * GIB

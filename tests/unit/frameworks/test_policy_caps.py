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
        ((), {}, {"torch": 8, "jax": 8}),
        (("torch", "jax"), {}, {"torch": 4, "jax": 4}),
        (("torch", "jax"), {"torch": 0.75}, {"torch": 6, "jax": 2}),
        (("torch", "jax"), {"torch": 0.75, "jax": 0.25}, {"torch": 6, "jax": 2}),
    ],
    ids=[
        "unnamed frameworks each have the whole budget",
        "named ones divide it equally",
        "one without a share has the rest",
        "each has its share",
    ],
)
def test_shares(frameworks, shares, caps):
    shared = policy(allocation="limit", frameworks=frameworks, shares=shares)
    assert {name: shared.cap_bytes(name)[0] // GIB for name in caps} == caps

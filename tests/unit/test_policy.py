"""`prefect_gpu.policy`: which policy tags ask for, and which tags `gpu` returns."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_gpu.errors import PolicyError
from prefect_gpu.policy import (
    FrameworkShare,
    GPUPolicy,
    gpu,
    is_gpu_tag,
    is_split_text,
    near_miss,
    parse_tags,
)
from prefect_gpu.units import GIB, KIB


@pytest.mark.parametrize(
    ("tag", "is_ours"),
    [
        pytest.param("gpu", True, id="the bare tag is ours"),
        pytest.param(" GPU ", True, id="case and outer spaces do not matter"),
        pytest.param("gpu:memory=1GiB", True, id="a key is ours"),
        pytest.param("gpu:nonsense", True, id="an unknown key is ours, to be refused"),
        pytest.param("gpu :memory=1GiB", True, id="a space before the colon is ours, to be refused"),
        pytest.param("gpu-heavy", False, id="another word with gpu in front is not"),
        pytest.param("team:gpu", False, id="gpu after something else is not"),
        pytest.param("", False, id="an empty tag is not"),
    ],
)  # fmt: skip
def test_which_tags_are_gpu_tags(tag: str, is_ours: bool) -> None:
    assert is_gpu_tag(tag) is is_ours


@pytest.mark.parametrize("tag", ["gpu :memory=1GiB", " GPU\t: exclusive"])
def test_a_space_before_the_colon_is_an_error(tag: str) -> None:
    with pytest.raises(PolicyError, match="there is a space before the colon") as caught:
        parse_tags([tag])
    assert tag in str(caught.value)


def test_without_a_gpu_tag_there_is_no_policy() -> None:
    assert parse_tags(["nightly"], {"team:vision"}) is None


@pytest.mark.parametrize(
    ("tags", "policy"),
    [
        pytest.param(["gpu"], GPUPolicy(), id="the bare tag asks for the defaults"),
        pytest.param(["gpu:memory=6GiB"], GPUPolicy(memory=6 * GIB, allocation="limit"), id="a budget implies gpu and caps the framework"),
        pytest.param(["gpu:memory=40%"], GPUPolicy(memory=0.4, allocation="limit"), id="a percentage is a fraction of each device"),
        pytest.param(["gpu:memory=6GiB", "gpu:allocation=growth"], GPUPolicy(memory=6 * GIB), id="growth with a budget is a reservation only"),
        pytest.param(["gpu:memory=6GiB", "gpu:caching=off"], GPUPolicy(memory=6 * GIB, caching=False), id="a budget without caching grows"),
        pytest.param(
            ["gpu:count=2", "gpu:device=02, GPU-1a"],
            GPUPolicy(count=2, devices=("2", "GPU-1a")),
            id="devices keep their order, and count may use all of them",
        ),
        pytest.param(
            ["gpu:device=gpu-2:01,a.b_c#1:0", "gpu:node=gpu-2, a.b_c#1"],
            GPUPolicy(devices=("gpu-2:1", "a.b_c#1:0"), nodes=("a.b_c#1", "gpu-2")),
            id="nodes, and devices of nodes",
        ),
        pytest.param(
            ["gpu:framework=torch:70%", "gpu:framework=JAX", "gpu:framework=jax"],
            GPUPolicy(frameworks=(FrameworkShare("jax"), FrameworkShare("torch", 0.7))),
            id="frameworks repeat, by name, duplicates once",
        ),
        pytest.param(
            ["gpu:framework=torch:10%", "gpu:framework=jax:20%", "gpu:framework=cupy:70%"],
            GPUPolicy(
                frameworks=(
                    FrameworkShare("cupy", 0.7),
                    FrameworkShare("jax", 0.2),
                    FrameworkShare("torch", 0.1),
                )
            ),
            id="shares may add up to all of it, rounding aside",
        ),
        pytest.param(
            [
                "gpu:alloc.max_split_size_mb=128",
                "gpu:alloc.garbage_collection_threshold=.8",
                "gpu:alloc.Expandable_Segments=TRUE",
                "gpu:alloc.roundup_power2_divisions=[256:1, 512:0,>:4]",
                "gpu:alloc.backend=cudamallocasync",
            ],
            GPUPolicy(
                allocator_options=(
                    ("backend", "cudaMallocAsync"),
                    ("expandable_segments", "True"),
                    ("garbage_collection_threshold", "0.8"),
                    ("max_split_size_mb", "128"),
                    ("roundup_power2_divisions", "[256:1,512:0,>:4]"),
                )
            ),
            id="allocator options are spelt as PyTorch reads them",
        ),
        pytest.param(
            ["gpu:alloc.roundup_power2_divisions=8"],
            GPUPolicy(allocator_options=(("roundup_power2_divisions", "8"),)),
            id="divisions may be one number",
        ),
        pytest.param(
            ["gpu:exclusive", "gpu:priority=-3", "gpu:wait=1.5 h", "gpu:cpus=4"],
            GPUPolicy(exclusive=True, priority=-3, wait_s=5400.0, cpus=4),
            id="what concerns the queue",
        ),
        pytest.param(
            ["gpu:oom=fail", "gpu:enforce=kill", "gpu:learn_by=size", "gpu:learn_by=Model"],
            GPUPolicy(oom="fail", enforce="kill", learn_by=("Model", "size")),
            id="parameters keep their case",
        ),
        pytest.param(
            ["gpu:memory=1GiB", "gpu:memory = 1024 mib"],
            GPUPolicy(memory=GIB, allocation="limit"),
            id="the same value twice is no contradiction",
        ),
        pytest.param(["nightly", "gpu"], GPUPolicy(), id="other tags are passed over"),
    ],
)  # fmt: skip
def test_tags_are_read_as_a_policy(tags: list[str], policy: GPUPolicy) -> None:
    assert parse_tags(tags) == policy


def test_a_policy_is_hashable() -> None:
    assert len({parse_tags(["gpu:memory=1GiB"]), parse_tags(["gpu:memory=1024MiB"])}) == 1


def test_tags_of_the_context_take_precedence_key_by_key() -> None:
    policy = parse_tags(
        ["gpu:memory=6GiB", "gpu:count=2", "gpu:framework=torch", "gpu:alloc.backend=native"],
        {"gpu:memory=2GiB", "gpu:framework=jax", "gpu:alloc.max_split_size_mb=64"},
    )
    assert policy == GPUPolicy(
        memory=2 * GIB,
        count=2,
        frameworks=(FrameworkShare("jax"),),
        allocation="limit",
        allocator_options=(("backend", "native"), ("max_split_size_mb", "64")),
    )


def test_a_tag_of_the_context_alone_makes_a_gpu_task() -> None:
    assert parse_tags([], ["gpu"]) == GPUPolicy()


def test_a_default_that_a_task_states_is_kept_when_the_context_adds_a_budget() -> None:
    assert parse_tags(gpu(allocation="growth"), ["gpu:memory=1GiB"]) == GPUPolicy(memory=GIB)


@pytest.mark.parametrize(
    ("tags", "parts"),
    [
        pytest.param(["gpu:memry=6GiB"], ["'memry'", "gpu:memory?", "gpu:wait"], id="misspelt key"),
        pytest.param(["gpu:mem=6GiB"], ["'mem'", "did you mean gpu:memory=6GiB?"], id="a short name of a key"),
        pytest.param(["gpu:vram"], ["did you mean gpu:memory?"], id="another name of a key"),
        pytest.param(["gpu:1GiB"], ["did you mean gpu:memory=1GiB?"], id="budget without its key"),
        pytest.param(["gpu:2"], ["did you mean gpu:count=2?"], id="number without its key"),
        pytest.param(["gpu:memory:1GiB"], ["did you mean gpu:memory=1GiB?"], id="colon for the equals sign"),
        pytest.param(["gpu::memory=1GiB"], ["did you mean gpu:memory=1GiB?"], id="two colons"),
        pytest.param(["gpu:zzz"], ["'zzz' is not a known key;"], id="key like no other"),
        pytest.param(["gpu:"], ["'' is not a known key"], id="no key"),
        pytest.param(["gpu:memory=12 bananas"], ["'bananas'", "GiB"], id="unit of fruit"),
        pytest.param(["gpu:memory=8"], ["8GiB?"], id="bare number"),
        pytest.param(["gpu:memory=0GiB"], ["not more than zero"], id="no memory"),
        pytest.param(["gpu:memory=120%"], ["up to 100"], id="more than a device"),
        pytest.param([f"gpu:memory=0.{'0' * 322}1%"], ["more than zero"], id="fraction too small"),
        pytest.param([f"gpu:memory={'9' * 400}GiB"], ["infinity"], id="size beyond numbers"),
        pytest.param(["gpu:memory=8192TiB"], ["less than 8192TiB"], id="size beyond devices"),
        pytest.param(["gpu:memory="], ["memory has no value"], id="empty value"),
        pytest.param(["gpu:memory"], ["memory has no value"], id="key alone"),
        pytest.param(["gpu:memory=1GiB", "gpu:memory=2GiB"], ["two values", " and "], id="two budgets"),
        pytest.param(["gpu:count=0"], ["0 is less than 1"], id="no device"),
        pytest.param(["gpu:count=two"], ["'two' is not a whole number"], id="count in words"),
        pytest.param(["gpu:count=3", "gpu:device=0,1"], ["gpu:count=3 with gpu:device=0,1"], id="fewer devices than count"),
        pytest.param(["gpu:device=0,0"], ["device 0 is named twice"], id="device twice"),
        pytest.param(["gpu:device=first"], ["neither an index nor a UUID prefix"], id="device by name"),
        pytest.param(["gpu:device=0,"], ["''"], id="trailing comma"),
        pytest.param(["gpu:device=a:0,a:00"], ["device a:0 is named twice"], id="device of a node twice"),
        pytest.param(["gpu:device=a b:0"], ["'a b:0' is neither"], id="device of no node"),
        pytest.param(["gpu:node=a b"], ["'a b' is not a name of a node", "gpu:node=gpu-1,gpu-2"], id="no name of a node"),
        pytest.param(["gpu:node=a,"], ["''"], id="node without a name"),
        pytest.param(["gpu:node=a,a"], ["node a is named twice"], id="node twice"),
        pytest.param(["gpu:node=a", "gpu:node=b"], ["two values for node"], id="two nodes in two tags"),
        pytest.param(["gpu:framework=theano"], ["'theano' is not known;", "onnxruntime"], id="unknown framework"),
        pytest.param(["gpu:framework=pytorch"], ["did you mean torch?"], id="framework by another name"),
        pytest.param(["gpu:framework=tf"], ["did you mean tensorflow?"], id="framework by a short name"),
        pytest.param(["gpu:framework=onnx:50%"], ["did you mean onnxruntime?"], id="framework by its format"),
        pytest.param(["gpu:framework=Keras"], ["did you mean tensorflow, torch or jax, whichever Keras runs on?"], id="keras"),
        pytest.param(["gpu:framework=mem"], ["'mem' is not known;"], id="another name of something else"),
        pytest.param(["gpu:framework=torch:70"], ["'70' is not a percentage"], id="share without percent"),
        pytest.param(["gpu:framework=torch:0." + "0" * 322 + "1%"], ["is not a percentage"], id="share too small"),
        pytest.param(["gpu:framework=none:50%"], ["none has no share"], id="share of nothing"),
        pytest.param(["gpu:framework=none", "gpu:framework=jax"], ["none excludes"], id="none and another"),
        pytest.param(["gpu:framework=torch:70%", "gpu:framework=jax:40%"], ["more than 100%"], id="shares above all"),
        pytest.param(["gpu:framework=torch:100%", "gpu:framework=jax"], ["nothing for"], id="nothing left"),
        pytest.param(["gpu:framework=torch:70%", "gpu:framework=torch:20%"], ["two shares"], id="duplicate framework"),
        pytest.param(["gpu:allocation=all", "gpu:caching=off"], ["disables the cap"], id="all without caching"),
        pytest.param(["gpu:allocation=limit", "gpu:caching=off"], ["disables the cap"], id="limit without caching"),
        pytest.param(["gpu:caching=no"], ["on or off"], id="caching with another word"),
        pytest.param(["gpu:exclusive=yes"], ["takes no value"], id="exclusive with a value"),
        pytest.param(["gpu:cpus=0"], ["less than 1"], id="no threads"),
        pytest.param(["gpu:compute=50"], ["'50' is not a percentage", "gpu:compute=50%"], id="compute without percent"),
        pytest.param(["gpu:compute=120%"], ["'120%' is not a percentage"], id="more than all of the chip"),
        pytest.param(["gpu:wait=10"], ["10s?"], id="bare duration"),
        pytest.param([f"gpu:wait={'9' * 400}s"], ["finite"], id="endless wait"),
        pytest.param([f"gpu:wait=0.{'0' * 322}1ms"], ["not more than zero"], id="no wait"),
        pytest.param(["gpu:priority=high"], ["'high'", "gpu:priority=5"], id="priority in words"),
        pytest.param(["gpu:learn_by=batch size"], ["not a name of a parameter"], id="no parameter"),
        pytest.param(["gpu:alloc=1"], ["'' is not a known allocator option"], id="no option"),
        pytest.param(["gpu:alloc.max_split=64"], ["gpu:alloc.max_split_size_mb?"], id="misspelt option"),
        pytest.param(["gpu:alloc.max_split_size_mb=20"], ["20 is less than 21", "above 20"], id="split too small"),
        pytest.param(["gpu:alloc.garbage_collection_threshold=1.0"], ["between 0 and 1"], id="threshold of one"),
        pytest.param(["gpu:alloc.garbage_collection_threshold=0.0"], ["between 0 and 1"], id="threshold of zero"),
        pytest.param(["gpu:alloc.expandable_segments=1"], ["true or false"], id="segments as number"),
        pytest.param(["gpu:alloc.backend=jemalloc"], ["native or cudaMallocAsync"], id="unknown backend"),
        pytest.param(["gpu:alloc.roundup_power2_divisions=3"], ["'3' is not a power of two"], id="three divisions"),
        pytest.param(["gpu:alloc.roundup_power2_divisions=[256:1"], ["closing bracket"], id="open list"),
        pytest.param(["gpu:alloc.roundup_power2_divisions=[300:1]"], ["'300'"], id="odd interval"),
        pytest.param(["gpu:alloc.roundup_power2_divisions=[>:1,256:2]"], ["last `>`"], id="rest not last"),
        pytest.param(["gpu:alloc.roundup_power2_divisions=[256:3]"], ["'3' divisions"], id="odd divisions"),
    ],
)  # fmt: skip
def test_the_error_of_a_bad_tag_names_it(tags: list[str], parts: list[str]) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_tags(tags)
    text = str(caught.value)
    assert caught.value.accepted
    assert any(tag in text for tag in tags) or all(tag.split("=")[0] in text for tag in tags)
    for part in parts:
        assert part in text


def test_a_contradiction_between_sources_is_found_after_they_are_joined() -> None:
    with pytest.raises(PolicyError, match="disables the cap"):
        parse_tags(["gpu:allocation=limit"], ["gpu:caching=off"])


@given(st.text(max_size=60), st.sampled_from(["gpu:", "gpu:memory=", "gpu:alloc.", "gpu:device=", "gpu:alloc.roundup_power2_divisions=", "gpu:framework=", "gpu:wait="]))  # fmt: skip
def test_any_text_is_read_or_refused_as_policy(text: str, start: str) -> None:
    for tag in (text, start + text):
        try:
            parse_tags([tag])
        except PolicyError as error:
            assert tag.strip() in str(error)


# fmt: off
_WHOLE = [
    "gpu", "gpu:memory=6GiB", "gpu:memory=40%", "gpu:count=2", "gpu:device=0,GPU-1a", "gpu:device=gpu-2:0",
    "gpu:node=gpu-1,gpu-2", "gpu:framework=torch:70%", "gpu:framework=jax", "gpu:framework=none",
    "gpu:allocation=limit", "gpu:alloc.max_split_size_mb=128",
    "gpu:alloc.roundup_power2_divisions=[256:1,512:2,>:4]", "gpu:caching=off", "gpu:exclusive", "gpu:oom=fail",
    "gpu:priority=-5", "gpu:wait=1h 30m", "gpu:cpus=4", "gpu:learn_by=batch_size", "other",
]
# fmt: on
#: What no person writes, and a program may.
_ODD = st.sampled_from(
    [
        "\0",
        "\ud800",
        "\udfff",
        "\u202e",
        "٣",
        "９",
        "²",
        "𝟙",
        "e9",
        "_",
        "-",
        "=",
        ":",
        ".",
        ",",
        "%",
        "[",
        "nan",
        "inf",
        "\n",
    ]
)  # fmt: skip


@st.composite
def _damaged(draw: st.DrawFn) -> str:
    tag = draw(st.sampled_from(_WHOLE))
    for _ in range(draw(st.integers(0, 3))):
        at, end = draw(st.integers(0, len(tag))), draw(st.integers(0, len(tag)))
        tag = tag[:at] + draw(_ODD | st.text(max_size=2)) + tag[max(at, end) :]
    return tag


@given(st.lists(_damaged(), max_size=6), st.lists(_damaged(), max_size=3))
def test_any_mix_of_damaged_tags_is_read_or_refused(own: list[str], around: list[str]) -> None:
    try:
        policy = parse_tags(own, around)
    except PolicyError as error:
        assert "; accepted: " in str(error)
    else:
        assert (policy is None) == (not any(map(is_gpu_tag, own + around)))
        assert policy == parse_tags(reversed(own), reversed(around))


@pytest.mark.parametrize("text", ["9", "\0", "\ud800", "1,", "0.", ">:4,"])
def test_a_tag_of_any_length_is_read_or_refused(text: str) -> None:
    for start in ("gpu", "gpu:", "gpu:memory=", "gpu:device=", "gpu:framework=torch:", "gpu:wait=", "gpu:alloc.", "gpu:alloc.roundup_power2_divisions=["):  # fmt: skip
        try:
            parse_tags([start + text * (200_000 // len(text))])
        except PolicyError as error:
            assert start in str(error)


_options = st.fixed_dictionaries(
    {},
    optional={
        "max_split_size_mb": st.integers(21, 10**6).map(str),
        "garbage_collection_threshold": st.integers(1, 99).map(lambda each: f"0.{each:02d}"),
        "expandable_segments": st.sampled_from(["True", "False"]),
        "roundup_power2_divisions": st.sampled_from(["1", "16", "[256:1,512:2,>:4]", "[>:0]"]),
        "backend": st.sampled_from(["native", "cudaMallocAsync"]),
    },
)


@st.composite
def _shares(draw: st.DrawFn) -> tuple[FrameworkShare, ...]:
    names = draw(st.lists(st.sampled_from(["cupy", "jax", "tensorflow", "torch"]), unique=True))
    most = 100 // max(1, len(names)) - 1
    percent = st.none() | st.integers(1, most)
    shares = [(name, draw(percent)) for name in sorted(names)]
    return tuple(FrameworkShare(name, each and each / 100) for name, each in shares)


@st.composite
def _policies(draw: st.DrawFn) -> GPUPolicy:
    names = st.sampled_from(["0", "1", "17", "gpu-2:0", "GPU-1a2b", "MIG-3c", "SIM-0"])
    devices = draw(st.lists(names, unique=True))
    caching = draw(st.booleans())
    return GPUPolicy(
        memory=draw(
            st.none()
            | st.integers(1, 2**40).map(lambda size_kib: size_kib * KIB)
            | st.integers(1, 100).map(lambda percentage: percentage / 100)
        ),
        count=draw(st.integers(1, len(devices) or 64)),
        devices=tuple(devices),
        frameworks=draw(_shares()),
        allocation=draw(st.sampled_from(["limit", "growth", "all"])) if caching else "growth",
        allocator_options=tuple(sorted(draw(_options).items())),
        caching=caching,
        exclusive=draw(st.booleans()),
        oom=draw(st.sampled_from(["escalate", "fail"])),
        enforce=draw(st.sampled_from(["warn", "kill"])),
        priority=draw(st.integers(-(10**6), 10**6)),
        wait_s=draw(st.none() | st.floats(1e-9, 1e12)),
        cpus=draw(st.none() | st.integers(1, 4096)),
        learn_by=tuple(sorted(draw(st.sets(st.from_regex(r"[a-z_]{1,8}", fullmatch=True))))),
        nodes=tuple(sorted(draw(st.sets(st.from_regex(r"[A-Za-z0-9._#-]{1,8}", fullmatch=True))))),
    )


def tags_of(policy: GPUPolicy) -> list[str]:
    """Every field of a policy as an argument of `gpu`."""
    memory = policy.memory
    size = f"{memory * 100:g}%" if isinstance(memory, float) else f"{(memory or 0) // KIB}KiB"
    return gpu(
        memory=None if memory is None else size,
        count=policy.count,
        device=policy.devices or None,
        framework=[str(share) for share in policy.frameworks],
        allocation=policy.allocation,
        alloc=dict(policy.allocator_options),
        caching=policy.caching,
        exclusive=policy.exclusive,
        oom=policy.oom,
        enforce=policy.enforce,
        priority=policy.priority,
        wait=policy.wait_s,
        cpus=policy.cpus,
        learn_by=policy.learn_by,
        node=policy.nodes or None,
    )


@given(_policies())
def test_the_tags_of_gpu_are_read_as_its_arguments_ask(policy: GPUPolicy) -> None:
    tags = tags_of(policy)
    random.Random(0).shuffle(tags)
    assert parse_tags(tags) == policy


@given(_policies(), st.randoms(use_true_random=False))
def test_case_and_spaces_do_not_matter(policy: GPUPolicy, choices: random.Random) -> None:
    def vary(tag: str) -> str:
        key, equals, text = tag.partition("=")
        # Prefixes and parameters are as written.
        if not key.endswith(("device", "learn_by", "node")):
            text = "".join(choices.choice((each.upper(), each.lower())) for each in text)
        return f" {choices.choice((key.upper(), key.title()))} {equals} {text}  "

    assert parse_tags(map(vary, tags_of(policy))) == policy


@pytest.mark.parametrize(
    ("tags", "written"),
    [
        pytest.param(gpu(), ["gpu"], id="nothing asked"),
        pytest.param(gpu(memory="6 gib", framework="torch"), ["gpu", "gpu:memory=6 gib", "gpu:framework=torch"], id="values as they are given"),
        pytest.param(
            gpu(device=[0, "GPU-1a"], count=2, framework=["jax", "torch:70%"]),
            ["gpu", "gpu:count=2", "gpu:device=0,GPU-1a", "gpu:framework=jax", "gpu:framework=torch:70%"],
            id="sequences",
        ),
        pytest.param(gpu(device=1), ["gpu", "gpu:device=1"], id="a device by its number"),
        pytest.param(gpu(node="a"), ["gpu", "gpu:node=a"], id="a node"),
        pytest.param(gpu(node=["b", "a"]), ["gpu", "gpu:node=b,a"], id="nodes"),
        pytest.param(
            gpu(alloc={"expandable_segments": True, "max_split_size_mb": 128, "garbage_collection_threshold": 1e-05}),
            ["gpu", "gpu:alloc.expandable_segments=True", "gpu:alloc.max_split_size_mb=128", "gpu:alloc.garbage_collection_threshold=0.00001"],
            id="allocator options as Python values",
        ),
        pytest.param(gpu(caching=False), ["gpu", "gpu:caching=off"], id="caching as a bool"),
        pytest.param(gpu(caching="on"), ["gpu", "gpu:caching=on"], id="a default that is stated"),
        pytest.param(gpu(exclusive=True), ["gpu", "gpu:exclusive"], id="a tag without a value"),
        pytest.param(gpu(wait=90), ["gpu", "gpu:wait=90s"], id="seconds as a number"),
        pytest.param(gpu(wait="10m"), ["gpu", "gpu:wait=10m"], id="seconds as text"),
        pytest.param(
            gpu(allocation="all", oom="fail", enforce="kill", priority=5, cpus=4, learn_by=["b", "a"]),
            ["gpu", "gpu:allocation=all", "gpu:oom=fail", "gpu:enforce=kill", "gpu:priority=5", "gpu:cpus=4", "gpu:learn_by=b", "gpu:learn_by=a"],
            id="everything else",
        ),
    ],
)  # fmt: skip
def test_gpu_returns_the_tags_of_its_arguments(tags: list[str], written: list[str]) -> None:
    assert tags == written


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"memory": 8}, id="a number without a unit"),
        pytest.param({"device": []}, id="a list of no devices"),
        pytest.param({"node": []}, id="a list of no nodes"),
        pytest.param({"exclusive": "no"}, id="a word for a bool"),
        pytest.param({"framework": {"torch": "70%"}}, id="a share in a mapping"),
        pytest.param({"framework": 5}, id="a number for a framework"),
        pytest.param({"device": 1.5}, id="a fraction of a device"),
        pytest.param({"wait": True}, id="a bool for seconds"),
        pytest.param({"alloc": "x"}, id="an option without a name"),
        pytest.param({"alloc": {"max_split": 64}}, id="an unknown option"),
        pytest.param({"wait": float("nan")}, id="seconds that are no number"),
        pytest.param({"caching": False, "allocation": "limit"}, id="a contradiction"),
    ],
)
def test_gpu_refuses_bad_arguments(arguments: dict[str, object]) -> None:
    with pytest.raises(PolicyError):
        gpu(**arguments)  # type: ignore[arg-type]


def test_the_first_argument_of_gpu_is_the_memory() -> None:
    assert gpu("1GiB") == gpu(memory="1GiB")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("mem", "memory"), ("vram", "memory"), ("memroy", "memory"), ("Devices", "device")],
)
def test_gpu_suggests_the_argument_that_was_meant(name: str, meant: str) -> None:
    with pytest.raises(PolicyError) as caught:
        gpu(**{name: "1GiB"})  # type: ignore[arg-type]
    assert caught.value.given == f"gpu({name}=...)"
    assert caught.value.problem == f"{name!r} is not a known argument; did you mean {meant}?"
    assert "learn_by" in caught.value.accepted


@pytest.mark.parametrize(
    ("tag", "meant"),
    [
        pytest.param("gpu-memory=4GiB", "gpu:memory=4GiB", id="a hyphen for the colon"),
        pytest.param("GPU_Memory = 40%", "gpu:memory=40%", id="an underscore, and spaces"),
        pytest.param("gpu memory=4GiB", "gpu:memory=4GiB", id="a space for the colon"),
        pytest.param("gpu\uff1amemory=4GiB", "gpu:memory=4GiB", id="a wide colon"),
        pytest.param("gpumemory=4GiB", "gpu:memory=4GiB", id="nothing for the colon"),
        pytest.param("gpu-memory:4GiB", "gpu:memory=4GiB", id="a colon for the equals sign"),
        pytest.param("gpu_mem=4GiB", "gpu:memory=4GiB", id="a short name of memory"),
        pytest.param("gpus:memory=4GiB", "gpu:memory=4GiB", id="a plural"),
        pytest.param("gpu=6GiB", "gpu:memory=6GiB", id="a budget without its key"),
        pytest.param("memory=6GiB", "gpu:memory=6GiB", id="a budget without gpu"),
        pytest.param("mem: 40%", "gpu:memory=40%", id="a percentage without gpu"),
        pytest.param("vram=6GiB", "gpu:memory=6GiB", id="another name of memory without gpu"),
        pytest.param("gpu=1", "gpu:count=1", id="a number"),
        pytest.param("gpus=2", "gpu:count=2", id="a number after a plural"),
        pytest.param("gpus", "gpu", id="a plural alone"),
        pytest.param("gpu=true", "gpu", id="a yes"),
        pytest.param("gpu=", "gpu", id="no value"),
        pytest.param("gpu-exclusive", "gpu:exclusive", id="a key without a value"),
        pytest.param("gpu-exclusive=yes", "gpu:exclusive", id="a key that takes none"),
        pytest.param("gpu.count=2", "gpu:count=2", id="a dot for the colon"),
        pytest.param("gpu-alloc.backend=native", "gpu:alloc.backend=native", id="an allocator option"),
        pytest.param("gpu,gpu:memory=6GiB", "gpu:memory=6GiB", id="two tags in one text"),
    ],
)  # fmt: skip
def test_a_tag_that_is_almost_a_gpu_tag_is_noticed(tag: str, meant: str) -> None:
    assert near_miss(tag) == meant
    assert parse_tags([meant]) is not None


@pytest.mark.parametrize(
    "tag",
    [
        *("gpu", "gpu:memory=4GiB", "gpu-2", "gpu-cluster", "gpu-memory", "memory-model", "gpus-team", "gpu_pool"),
        *("memory", "memory=high", "memory-bound", "mem", "gpu=no", "gpu-node-1", "gpu-model=A100", "gpu-team=vision"),
        *("gpu-exclusive=no", "framework=torch", "priority=5", "exclusive", "cuda:0", "wait=10m", ""),
    ],
)  # fmt: skip
def test_tags_of_others_are_left_alone(tag: str) -> None:
    assert near_miss(tag) is None


@pytest.mark.parametrize(
    ("tags", "is_split"),
    [
        pytest.param("gpu", True, id="gpu alone"),
        pytest.param("GPU:memory=1GiB", True, id="a tag with a value"),
        pytest.param(["g", "p"], False, id="short tags of a user"),
        pytest.param(["g", "p", "u", "nightly"], False, id="beside a longer tag"),
        pytest.param(["gpu"], False, id="a list"),
        pytest.param([], False, id="no tags"),
    ],
)
def test_a_text_in_place_of_a_list_is_noticed(tags: str | list[str], is_split: bool) -> None:
    assert is_split_text(set(tags)) == is_split

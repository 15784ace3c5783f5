"""Read the `gpu` tags of a task into a `GPUPolicy`, and build them with `gpu`.

The table `_KEYS` has the reader and the accepted text of each tag, for the parser and its error messages.
`prefect_gpu.scheduling` decides whether a machine can satisfy a policy.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Integral
from typing import Any, Literal, NoReturn

from prefect_gpu.errors import PolicyError
from prefect_gpu.units import DURATIONS_ACCEPTED, SIZES_ACCEPTED, parse_duration, parse_size

Allocation = Literal["limit", "growth", "all"]
OnOutOfMemory = Literal["escalate", "fail"]
Enforcement = Literal["warn", "kill"]

#: Names for `gpu:framework=`. `none`: no adapter applies the policy.
FRAMEWORKS = ("torch", "tensorflow", "jax", "cupy", "onnxruntime", "none")

#: Smallest refused size in bytes (8 PiB, more than any device). Sizes are floating-point numbers, exact up to here.
_BYTES_LIMIT = 2**53


@dataclass(frozen=True, slots=True)
class FrameworkShare:
    """A framework to which the policy applies, and the framework's share of the budget."""

    #: One of `FRAMEWORKS`.
    name: str
    #: Share of the budget, in (0, 1]. `None`: the rest.
    fraction: float | None = None

    def __str__(self) -> str:
        """Return the share as in a tag: `torch` or `torch:70%`."""
        return self.name if self.fraction is None else f"{self.name}:{self.fraction * 100:.6g}%"


def read_memory(text: str) -> int | float:
    """Return the bytes (`int`) of a text such as `6GiB`, or the fraction (`float`) of `40%`; raise `ValueError`."""
    size = parse_size(text)
    if not 0 < size < _BYTES_LIMIT:
        raise ValueError(f"{text!r} is not more than zero and less than 8192TiB")
    return size


def read_percentage(text: str) -> float:
    """Return the fraction of a text such as `50%`; raise `ValueError`."""
    fraction = parse_size(text) if text.endswith("%") else 0
    if not isinstance(fraction, float) or fraction <= 0:
        raise ValueError(f"{text!r} is not a percentage")
    return fraction


def read_wait(text: str) -> float:
    """Return the seconds of a text such as `10m`; raise `ValueError` unless they are positive and finite."""
    seconds = parse_duration(text)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{text!r} is not more than zero and finite")
    return seconds


def whole(least: int | None = None) -> Callable[[str], int]:
    """Return a function that reads whole numbers of at least `least` (`None`: any) and raises `ValueError`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise ValueError(f"{text!r} is not a whole number")
        if least is not None and int(text) < least:
            raise ValueError(f"{int(text)} is less than {least}")
        return int(text)

    return read


#: Common other names of keys and frameworks, and their meaning. `difflib` finds only misspelt names.
_OTHER_NAMES = {
    "mem": "memory",
    "vram": "memory",
    "keras": "tensorflow, torch or jax, whichever Keras runs on",
    "tf": "tensorflow",
    "onnx": "onnxruntime",
}


def _hint(name: str, known: Mapping[str, str]) -> str:
    """Return "; did you mean NAME?" for an unknown name, or no text. `known`: suggestions by lower-case name."""
    other = _OTHER_NAMES.get(name, "")
    if re.split(r"\W", other)[0] in known:
        return f"; did you mean {known.get(other, other)}?"
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {known[close[0]]}?" if close else ""


def word(*words: str) -> Callable[[str], str]:
    """Return a function that reads one of `words` in any case and returns it in the given spelling."""
    spelt = {word.lower(): word for word in words}

    def read(text: str) -> str:
        if text.lower() in spelt:
            return spelt[text.lower()]
        raise ValueError(f"{text!r} is not known{_hint(text.lower(), spelt)}")

    return read


#: Name of a node: of a host, or of one of several simulated nodes on it.
_NODE = r"[A-Za-z0-9._#-]{1,255}"


def read_devices(text: str) -> tuple[str, ...]:
    """Return the indices, nodes with indices and UUID prefixes of a text such as `0,gpu-2:1,GPU-1a`, in its order."""
    devices = []
    for device in (part.strip() for part in text.split(",")):
        if re.fullmatch(rf"({_NODE}:)?[0-9]{{1,9}}", device):
            node, colon, index = device.rpartition(":")
            device = f"{node}{colon}{int(index)}"
        elif not re.fullmatch(r"(?i:GPU|MIG|HOST|SIM)-[\w./:-]+", device, re.ASCII):
            raise ValueError(f"{device!r} is neither an index nor a UUID prefix")
        if device in devices:
            raise ValueError(f"device {device} is named twice")
        devices.append(device)
    return tuple(devices)


def read_nodes(text: str) -> tuple[str, ...]:
    """Return the sorted names of nodes in a text such as `gpu-1,gpu-2`. Case matters."""
    nodes = [part.strip() for part in text.split(",")]
    for node in nodes:
        if not re.fullmatch(_NODE, node):
            raise ValueError(f"{node!r} is not a name of a node")
        if nodes.count(node) > 1:
            raise ValueError(f"node {node} is named twice")
    return tuple(sorted(nodes))


def read_share(text: str) -> FrameworkShare:
    """Return the framework and the share of a text such as `torch` or `torch:70%`; raise `ValueError`."""
    name, colon, share = (part.strip() for part in text.partition(":"))
    name = word(*FRAMEWORKS)(name)
    if not colon:
        return FrameworkShare(name)
    if name == "none":
        raise ValueError("none has no share")
    try:
        return FrameworkShare(name, read_percentage(share))
    except ValueError as error:
        raise ValueError(f"share {share!r} is not a percentage") from error


def read_parameter(text: str) -> str:
    """Return the name of a parameter, with its case; raise `ValueError` if the text is not an identifier."""
    if not text.isidentifier():
        raise ValueError(f"{text!r} is not a name of a parameter")
    return text


def _read_threshold(text: str) -> str:
    if not re.fullmatch(r"0?\.[0-9]{1,17}", text) or float(text) == 0:
        raise ValueError(f"{text!r} is not between 0 and 1")
    return text if text.startswith("0") else f"0{text}"


def _read_divisions(text: str) -> str:
    if not text.startswith("["):
        if _power_of_two(text):
            return str(int(text))
        raise ValueError(f"{text!r} is not a power of two")
    if not text.endswith("]"):
        raise ValueError("the list has no closing bracket")
    pairs = [pair.partition(":") for pair in re.sub(r"\s", "", text[1:-1]).split(",")]
    for position, (size, _, divisions) in enumerate(pairs, 1):
        if not _power_of_two(size) and not (size == ">" and position == len(pairs)):
            raise ValueError(f"{size!r} is neither a power of two nor a last `>`")
        if divisions != "0" and not _power_of_two(divisions):
            raise ValueError(f"{divisions!r} divisions are neither 0 nor a power of two")
    return f"[{','.join(f'{size}:{divisions}' for size, _, divisions in pairs)}]"


def _power_of_two(text: str) -> bool:
    return bool(re.fullmatch(r"[1-9][0-9]{0,11}", text)) and int(text).bit_count() == 1


def format_number(value: float) -> str:
    """Return a number without an exponent, in the fewest digits that read back the same."""
    return format(Decimal(repr(float(value))), "f").removesuffix(".0")


@dataclass(frozen=True, slots=True)
class GPUPolicy:
    """The parsed tags of a task, with defaults for other tags; see `parse_tags`. Hashable."""

    #: Budget on each device, context included: bytes (`int`) or a fraction of the device's total (`float` in (0, 1]).
    #: `None`: no tag states a budget.
    memory: int | float | None = None
    #: Number of devices. The task gets all of them or none.
    count: int = 1
    #: Indices ("0"), nodes with indices ("gpu-2:0") or UUID prefixes ("GPU-1a"), in the given order. Empty: any.
    devices: tuple[str, ...] = ()
    #: Frameworks whose adapters apply the policy. Empty: the frameworks that the task imports.
    frameworks: tuple[FrameworkShare, ...] = ()
    #: "limit": frameworks are capped at the budget. "growth": no cap. "all": frameworks take the budget at start.
    allocation: Allocation = "growth"
    #: PyTorch allocator options as pairs of name and text, sorted by name, in PyTorch's spelling.
    allocator_options: tuple[tuple[str, str], ...] = ()
    #: `False`: PyTorch's caching allocator is disabled, for memory checkers.
    caching: bool = True
    #: No other GPU task of any flow uses the task's devices at the same time.
    exclusive: bool = False
    #: After an out-of-memory error: run again with more memory, or fail.
    oom: OnOutOfMemory = "escalate"
    #: Reaction to a process that uses more than its budget, memory outside frameworks included.
    enforce: Enforcement = "warn"
    #: Tasks of a higher priority start first.
    priority: int = 0
    #: The task may be suspended for a task of a higher priority, or moved to another device to make room.
    preemptible: bool = False
    #: Seconds in the queue after which the task fails. `None`: no limit.
    wait_s: float | None = None
    #: CPU threads that the frameworks may start. `None`: the runner's share of the cores.
    cpus: int | None = None
    #: Part of the device's multiprocessors that the task may use, in (0, 1]; under MPS only. `None`: all.
    compute: float | None = None
    #: Names of parameters; each combination of their values has a history of its own.
    learn_by: tuple[str, ...] = ()
    #: Names of the nodes of a cluster that the task may use, sorted. Empty: any.
    nodes: tuple[str, ...] = ()
    #: Keys that the tags named, even with their default value. Not compared.
    stated: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        if not self.caching and self.allocation != "growth":
            raise PolicyError(
                f"gpu:caching=off with gpu:allocation={self.allocation}",
                f"caching=off disables the cap that allocation={self.allocation} needs",
                "gpu:caching=off with gpu:allocation=growth, or gpu:caching=on",
            )
        if self.devices and self.count > len(self.devices):
            raise PolicyError(
                f"gpu:count={self.count} with gpu:device={','.join(self.devices)}",
                f"{self.count} devices are asked for and only {len(self.devices)} named",
                f"at least {self.count} devices, or a smaller count",
            )
        _check_frameworks(self.frameworks)


def why_alone(policy: GPUPolicy) -> str | None:
    """Return why a task's first run is alone on a device: `gpu:exclusive`, or no memory cap. `None`: it may share."""
    if policy.exclusive:
        return "gpu:exclusive"
    if "allocation" in policy.stated and policy.allocation != "limit":
        return f"gpu:allocation={policy.allocation} leaves no room for others"
    if not policy.caching:
        return "gpu:caching=off has no cap"
    if {share.name for share in policy.frameworks} == {"none"}:
        return "gpu:framework=none has no cap"
    return None


def is_gpu_tag(tag: str) -> bool:
    """Return whether `tag` is `gpu` or starts with `gpu:`, ignoring case and spaces. `parse_tags` refuses `gpu :`."""
    return tag.partition(":")[0].strip().lower() == "gpu"


_YES = ("1", "true", "yes", "on")


def near_miss(tag: str) -> str | None:
    """Return the GPU tag that was probably meant, as `gpu:memory=4GiB` for `gpu-memory=4GiB`; `None`: no such tag."""
    return None if is_gpu_tag(tag) else _meant(tag)


def _meant(tag: str) -> str | None:
    budget_alone = re.fullmatch(r"(?is)\s*(?:memory|mem|vram)\s*[=:]\s*(.+)", tag)
    if budget_alone is not None and _is_budget(budget_alone[1]):
        return f"gpu:memory={budget_alone[1].strip()}"
    # Text like a GPU tag, with any separator.
    found = re.fullmatch(r"(?is)\s*gpu(s?)\s*([\W_]*)(.*)", tag)
    if found is None:
        return None
    plural, separator, rest = found[1], found[2], found[3].strip()
    if separator and is_gpu_tag(rest):  # several in one text: a GPU tag implies `gpu`
        return rest
    assigned = re.sub("[=:]+", "=", rest, count=1)
    name, equals, value = (part.strip() for part in assigned.partition("="))
    name = _OTHER_NAMES.get(name.lower(), name.lower())
    key = _BY_NAME.get(name)
    if key is not None and key.bare and (not equals or value.lower() in _YES):
        return f"gpu:{name}"
    if key is not None and not key.bare and equals:
        return f"gpu:{name}={value}"
    if separator and _is_budget(rest):
        return f"gpu:memory={rest}"
    if re.search("[=:]", separator) and re.fullmatch("[1-9][0-9]{0,3}", rest):
        return f"gpu:count={rest}"
    is_flag = not rest or ("=" in separator and rest.lower() in _YES)
    return "gpu" if is_flag and (plural or separator) else None


def _is_budget(text: str) -> bool:
    try:
        read_memory(text)
    except (ValueError, OverflowError):
        return False
    return True


def is_split_text(tags: Iterable[str]) -> bool:
    """Return whether tags are the characters of a text with `gpu`, as if `tags="gpu"` was given in place of a list."""
    characters = {tag.lower() for tag in tags}
    return characters >= set("gpu") and all(len(each) == 1 for each in characters)


def parse_tags(task_tags: Iterable[str], context_tags: Iterable[str] = ()) -> GPUPolicy | None:
    """Return the policy that `gpu` tags state, ignoring other tags; `None`: there is no `gpu` tag.

    Args:
        task_tags: The task's own tags, from `@task` and `with_options`.
        context_tags: Tags of `prefect.tags` contexts around the submit, which take precedence for each key.

    Raises:
        PolicyError: A tag cannot be read, is unknown or contradicts another.
    """
    # Prefect keeps tags in sets. Sorted, the same tags always raise the same error.
    sources = [sorted(filter(is_gpu_tag, tags)) for tags in (task_tags, context_tags)]
    if not any(sources):
        return None
    values: dict[str, Any] = {}
    for tags in sources:
        values |= _read_source(tags)
    asked: dict[str, Any] = {}
    options: dict[str, str] = {}
    for name, value in values.items():
        if name.startswith("alloc."):
            options[name.removeprefix("alloc.")] = value
        else:
            asked[_FIELDS.get(name, name)] = value
    capped = "memory" in asked and asked.get("caching", True)
    asked.setdefault("allocation", "limit" if capped else "growth")
    return GPUPolicy(
        **asked, allocator_options=tuple(sorted(options.items())), stated=frozenset(values)
    )


def gpu(
    memory: str | None = None,
    *,
    count: int | None = None,
    device: str | int | Sequence[str | int] | None = None,
    framework: str | Sequence[str] | None = None,
    allocation: Allocation | None = None,
    alloc: Mapping[str, str | int | float | bool] | None = None,
    caching: bool | Literal["on", "off"] | None = None,
    exclusive: bool = False,
    oom: OnOutOfMemory | None = None,
    enforce: Enforcement | None = None,
    priority: int | None = None,
    preemptible: bool = False,
    wait: str | float | None = None,
    cpus: int | None = None,
    compute: str | None = None,
    learn_by: str | Sequence[str] | None = None,
    node: str | Sequence[str] | None = None,
    **unknown: NoReturn,
) -> list[str]:
    """Check and return the tags of a GPU task, as in `@task(tags=gpu(memory="6GiB"))`.

    An argument that is not given makes no tag.

    Args:
        memory: Budget on each device, CUDA context included: `"6GiB"`, or `"40%"` of its total.
        count: Number of devices. The task gets all of them, on one node, or none.
        device: Only these devices, by index among the runner's devices on a node, by node and index
            (`"gpu-2:0"`) or by UUID prefix: the first that fits or, with `count`, these in this order.
        framework: Frameworks whose adapters apply the policy: `"torch"`, `"tensorflow"`, `"jax"`, `"cupy"`,
            `"onnxruntime"`, `"none"`; several share the budget, as in `["torch:70%", "jax:30%"]`.
        allocation: `"limit"` caps the frameworks at the budget, `"growth"` has no cap, `"all"` takes the budget
            at start.
        alloc: PyTorch allocator options, `{"max_split_size_mb": 128}`.
        caching: `False` or `"off"` disables PyTorch's caching allocator, for memory checkers.
        exclusive: No other GPU task of any flow uses the task's devices at the same time.
        oom: After an out-of-memory error, `"escalate"` runs the body again with more memory and `"fail"` fails.
        enforce: `"warn"` or `"kill"` when the process uses more than its budget, memory outside frameworks included.
        priority: Of the tasks that are ready, those of a higher priority start first.
        preemptible: The task's GPU memory may be moved to the host while a task of a higher priority needs the device,
            or to another device to make room. The task loses no step. Without effect on a cluster.
        wait: Fail if the task got no device after this long: `"10m"`, or a number of seconds.
        cpus: CPU threads that the frameworks may start.
        compute: Part of the device's multiprocessors that the task may use, `"50%"`; with `sharing="mps"` only.
        learn_by: Names of parameters; each combination of their values has a history of its own. Values are numbers,
            text, booleans, `None`, enums, paths, and tuples or lists of these. For a new number, the budget is estimated
            from other values.
        node: On a cluster: only the nodes of these names.
        **unknown: Refused with a `PolicyError` that suggests a known argument.

    Returns:
        The tags, `gpu` first, with the values as given.

    Raises:
        PolicyError: An argument cannot be read, is unknown or contradicts another.
    """
    for name in unknown:
        known = {key.name.partition(".")[0]: key.name.partition(".")[0] for key in _KEYS}
        problem = f"{name!r} is not a known argument{_hint(name.lower(), known)}"
        raise PolicyError(f"gpu({name}=...)", problem, ", ".join(known))
    if caching is True or caching is False:
        caching = "on" if caching else "off"
    if isinstance(wait, (int, float)) and not isinstance(wait, bool):
        wait = f"{format_number(wait)}s"
    if alloc is not None and not isinstance(alloc, Mapping):
        problem, accepted = "it is no mapping", 'options by name, as in {"max_split_size_mb": 128}'
        raise PolicyError(f"gpu(alloc={alloc!r})", problem, accepted)
    tags = ["gpu"]
    for key, value in {
        "memory": memory,
        "count": count,
        "device": None if device is None else ",".join(_several("device", device)),
        "node": None if node is None else ",".join(_several("node", node)),
        "allocation": allocation,
        "caching": caching,
        "oom": oom,
        "enforce": enforce,
        "priority": priority,
        "wait": wait,
        "cpus": cpus,
        "compute": compute,
    }.items():
        if value is not None:
            tags.append(f"gpu:{key}={value}")
    for key, several in {"framework": framework, "learn_by": learn_by}.items():
        names = () if several is None else _several(key, several)
        tags += [f"gpu:{key}={name}" for name in names]
    for key, option in (alloc or {}).items():
        text = format_number(option) if isinstance(option, float) else str(option)
        tags.append(f"gpu:alloc.{key}={text}")
    for key, flag in {"exclusive": exclusive, "preemptible": preemptible}.items():
        if flag is True:
            tags.append(f"gpu:{key}")
        elif flag is not False:  # not a bool, such as "no": the parser refuses it
            tags.append(f"gpu:{key}={flag}")
    parse_tags(tags)
    return tags


def _several(name: str, given: object) -> list[str]:
    """Return the values of an argument of `gpu` that takes one or several, as text."""
    if isinstance(given, (str, Integral)) and not isinstance(given, bool):
        return [str(given)]
    if not isinstance(given, Iterable) or isinstance(given, (Mapping, bytes)):
        problem = "it is neither one value nor a list"
        raise PolicyError(f"gpu({name}={given!r})", problem, _find("", name).accepted)
    return [str(each) for each in given]


@dataclass(frozen=True, slots=True)
class _Key:
    """One row of the table `_KEYS`: a key and its reader. The README has the meaning of each key."""

    #: Name as in `gpu:NAME=`.
    name: str
    #: Converts the text; raises `ValueError` with the problem.
    read: Callable[[str], Any]
    #: Accepted text, for error messages.
    accepted: str
    #: The key may occur more than once in one source.
    repeats: bool = False
    #: A tag without a value, such as `gpu:exclusive`.
    bare: bool = False


def _read_source(tags: Iterable[str]) -> dict[str, Any]:
    """Read the `gpu` tags of one source into values by key; each `alloc.KEY` is a key of its own."""
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    for tag in tags:
        if tag.strip().lower() == "gpu":
            continue
        if not tag.strip().lower().startswith("gpu:"):
            raise PolicyError(tag, "there is a space before the colon", "gpu:KEY=VALUE")
        name, equals, text = (part.strip() for part in tag.strip()[4:].partition("="))
        name = name.lower()
        key = _find(tag, name)
        if key.bare and equals:
            raise PolicyError(tag, f"{name} takes no value", key.accepted)
        if not key.bare and not text:
            raise PolicyError(tag, f"{name} has no value", key.accepted)
        try:
            value = key.read(text)
        except (ValueError, OverflowError) as error:
            # As the cause, the error would repeat its text.
            raise PolicyError(tag, str(error), key.accepted) from None
        if key.repeats:
            values[name] = tuple(sorted({*values.get(name, ()), value}, key=str))
        elif name in values and values[name] != value:
            raise PolicyError(
                f"{given[name]} and {tag}",
                f"two values for {name} from one source",
                "one of them; tags around the submit override the task's own",
            )
        else:
            values[name] = value
        given[name] = tag
    return values


def _find(tag: str, name: str) -> _Key:
    """Return the row of a key, or raise `PolicyError` with a suggestion."""
    head, _, option = name.partition(".")
    if name not in _BY_NAME and head == "alloc":
        raise _unknown(tag, "allocator option", option, "alloc.", ALLOCATOR_OPTIONS)
    if name not in _BY_NAME:
        raise _unknown(tag, "key", name, "", _BY_NAME)
    return _BY_NAME[name]


def _unknown(tag: str, what: str, name: str, prefix: str, known: Iterable[str]) -> PolicyError:
    tags = {name: f"gpu:{prefix}{name}" for name in known}
    meant = _meant(tag)
    hint = _hint(name, tags) if meant is None else f"; did you mean {meant}?"
    return PolicyError(tag, f"{name!r} is not a known {what}{hint}", ", ".join(tags.values()))


def _check_frameworks(shares: tuple[FrameworkShare, ...]) -> None:
    names = [share.name for share in shares]
    given = " with ".join(f"gpu:framework={share}" for share in shares)
    if len(set(names)) < len(names):
        raise PolicyError(given, "one framework has two shares", "each framework once")
    if "none" in names and len(names) > 1:
        raise PolicyError(given, "none excludes every other framework", "none, or frameworks")
    fractions = [share.fraction for share in shares if share.fraction is not None]
    # 0.1 + 0.2 + 0.7 > 1: thousandths of a percent are rounding errors.
    left = round(1 - math.fsum(fractions), 5)
    if left < 0:
        raise PolicyError(given, "the shares are more than 100% together", "shares up to 100%")
    if left == 0 and len(fractions) < len(shares):
        raise PolicyError(
            given, "the shares leave nothing for the framework without one", "shares below 100%"
        )


_KEYS = (
    _Key(
        "memory",
        read_memory,
        f"{SIZES_ACCEPTED}; or a percentage of each device above 0 and up to 100, as in 40%",
    ),
    _Key("count", whole(1), "a whole number from 1, as in gpu:count=2"),
    _Key(
        "device",
        read_devices,
        "indices among the runner's devices or UUID prefixes, with commas, as in gpu:device=0,2 or "
        "gpu:device=GPU-1a2b; on a cluster also a node and an index, as in gpu:device=gpu-2:0",
    ),
    _Key(
        "node",
        read_nodes,
        "names of nodes (letters, digits and ._-#), with commas, as in gpu:node=gpu-1,gpu-2",
    ),
    _Key(
        "framework",
        read_share,
        f"{', '.join(FRAMEWORKS[:-1])} or none, with a share of the budget if several split it, as "
        "in torch:70%",
        repeats=True,
    ),
    _Key("allocation", word("limit", "growth", "all"), "limit, growth or all"),
    # PyTorch checks these options in the child process only. Newer releases accept only the spelling `True`, and releases
    # differ on a `max_split_size_mb` of 20.
    _Key(
        "alloc.max_split_size_mb",
        lambda text: str(whole(21)(text)),
        "a whole number of MiB above 20, as in gpu:alloc.max_split_size_mb=128",
    ),
    _Key(
        "alloc.garbage_collection_threshold",
        _read_threshold,
        "a number between 0 and 1, as in gpu:alloc.garbage_collection_threshold=0.8",
    ),
    _Key("alloc.expandable_segments", word("True", "False"), "true or false"),
    _Key(
        "alloc.roundup_power2_divisions",
        _read_divisions,
        "a power of two, or a list of size:divisions pairs as in [256:1,512:2,>:4]",
    ),
    _Key("alloc.backend", word("native", "cudaMallocAsync"), "native or cudaMallocAsync"),
    _Key("caching", lambda text: word("on", "off")(text) == "on", "on or off"),
    _Key("exclusive", lambda _: True, "gpu:exclusive", bare=True),
    _Key("oom", word("escalate", "fail"), "escalate or fail"),
    _Key("enforce", word("warn", "kill"), "warn or kill"),
    _Key("priority", whole(), "a whole number, as in gpu:priority=5"),
    _Key("preemptible", lambda _: True, "gpu:preemptible", bare=True),
    _Key("wait", read_wait, DURATIONS_ACCEPTED),
    _Key("cpus", whole(1), "a whole number from 1, as in gpu:cpus=4"),
    _Key("compute", read_percentage, "a percentage above 0 and up to 100, as in gpu:compute=50%"),
    _Key(
        "learn_by",
        read_parameter,
        "a parameter's name, as in gpu:learn_by=batch_size",
        repeats=True,
    ),
)
_BY_NAME = {key.name: key for key in _KEYS}
#: Fields of `GPUPolicy` with another name than their key, by key.
_FIELDS = {"device": "devices", "node": "nodes", "framework": "frameworks", "wait": "wait_s"}
#: Names of PyTorch's allocator options.
ALLOCATOR_OPTIONS = tuple(name[6:] for name in _BY_NAME if name.startswith("alloc."))

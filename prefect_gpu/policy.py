"""Tags to and from `GPUPolicy`: what a task asks of its devices.

One table, `_KEYS`, says for every tag what it means, what it accepts and how it is read and written;
errors, `tag_table_markdown` and the parser come from it. What a machine can satisfy is not
decided here: see `prefect_gpu.scheduling`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from prefect_gpu.errors import PolicyError
from prefect_gpu.tag_values import (
    ALLOCATOR_OPTIONS,
    FRAMEWORKS,
    FrameworkShare,
    format_number,
    read_devices,
    read_memory,
    read_parameter,
    read_share,
    read_wait,
    whole,
    word,
    write_memory,
    write_plain,
    write_share,
    write_wait,
)
from prefect_gpu.units import DURATIONS_ACCEPTED, SIZES_ACCEPTED

__all__ = ["FrameworkShare", "GPUPolicy", "gpu", "is_gpu_tag", "parse_tags", "tag_table_markdown"]

Allocation = Literal["limit", "growth", "all"]
OnOutOfMemory = Literal["escalate", "fail"]
Enforcement = Literal["warn", "kill"]


@dataclass(frozen=True, slots=True)
class GPUPolicy:
    """What a task's tags ask for, defaults filled in. Hashable; made by `parse_tags`.

    Raises:
        PolicyError: Two fields contradict each other.
    """

    #: Budget on each device, context included: bytes (`int`) or a fraction of the device's total
    #: (`float` in (0, 1]). `None`: the author does not say.
    memory: int | float | None = None
    #: Devices, all or none.
    count: int = 1
    #: Indices ("0") or UUID prefixes as written ("GPU-1a"), in the author's order; empty: any.
    devices: tuple[str, ...] = ()
    #: Which adapters apply the policy, by name; empty: those that the task imports.
    frameworks: tuple[FrameworkShare, ...] = ()
    #: "limit": cap at the budget. "growth": no cap. "all": take the budget at start.
    allocation: Allocation = "growth"
    #: PyTorch allocator options as pairs of name and text, by name, spelt as PyTorch reads them.
    allocator_options: tuple[tuple[str, str], ...] = ()
    #: `False`: PyTorch's caching allocator is off, for memory checkers.
    caching: bool = True
    #: Nobody else of ours on its devices.
    exclusive: bool = False
    #: After an out-of-memory: run again with more, or fail.
    oom: OnOutOfMemory = "escalate"
    #: When the process as a whole passes its budget.
    enforce: Enforcement = "warn"
    #: Higher starts first.
    priority: int = 0
    #: Seconds in the queue after which the task fails; `None`: no limit.
    wait_s: float | None = None
    #: CPU threads that the frameworks may start; `None`: the runner's share of the cores.
    cpus: int | None = None
    #: Parameters whose values make a history of their own, by name.
    learn_by: tuple[str, ...] = ()
    #: Keys that tags gave, defaults spelt out among them. Not part of what a policy *is*.
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

    def to_tags(self) -> list[str]:
        """Write the tags that parse to this policy: what was stated, or differs from its default.

        Raises:
            ValueError: A field holds what no tag can say, such as an empty device or 0 bytes.
        """
        return ["gpu", *(tag for key in _KEYS for tag in key.tags(self) if self._says(key))]

    def _says(self, key: _Key) -> bool:
        default: object = _DEFAULTS[key.field]
        if key.field == "allocation":
            default = _default_allocation(self.memory, self.caching)
        return key.name in self.stated or getattr(self, key.field) != default


def is_gpu_tag(tag: str) -> bool:
    """Tell whether `tag` is `gpu` or starts with `gpu:`; case and outer spaces do not matter."""
    text = tag.strip().lower()
    return text == "gpu" or text.startswith("gpu:")


def parse_tags(task_tags: Iterable[str], context_tags: Iterable[str] = ()) -> GPUPolicy | None:
    """Read the policy that tags ask for.

    Args:
        task_tags: The task's own tags, from `@task` and `with_options`.
        context_tags: Tags of `prefect.tags` contexts around the submit; key by key they win
            over the task's.

    Returns:
        The policy, or `None` if neither source has a `gpu` tag. Other tags are passed over.

    Raises:
        PolicyError: A tag cannot be read, is unknown or contradicts another.
    """
    # Prefect keeps tags in sets: sorted, the same tags always give the same error.
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
            asked[_BY_NAME[name].field] = value
    asked.setdefault(
        "allocation", _default_allocation(asked.get("memory"), asked.get("caching", True))
    )
    return GPUPolicy(
        **asked, allocator_options=tuple(sorted(options.items())), stated=frozenset(values)
    )


def gpu(
    *,
    memory: str | None = None,
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
    wait: str | float | None = None,
    cpus: int | None = None,
    learn_by: str | Sequence[str] | None = None,
) -> list[str]:
    """Build the tags of a GPU task, checked: `@task(tags=gpu(memory="6GiB"))`.

    An argument left out makes no tag, so that the default holds, or what another source says.

    Args:
        memory: Budget on each device, CUDA context included: `"6GiB"`, or `"40%"` of its total.
        count: Devices, all or none.
        device: Only these devices, by index among the runner's or by UUID prefix: the first that
            fits or, with `count`, these in this order.
        framework: Which adapters apply the policy: `"torch"`, `"tensorflow"`, `"jax"`, `"cupy"`,
            `"onnxruntime"`, `"none"`; several share the budget, as in `["torch:70%", "jax:30%"]`.
        allocation: `"limit"` caps at the budget, `"growth"` does not, `"all"` takes it at start.
        alloc: PyTorch allocator options, `{"max_split_size_mb": 128}`.
        caching: `False` or `"off"` switches PyTorch's caching allocator off, for memory checkers.
        exclusive: Nobody else of ours on its devices.
        oom: `"escalate"` runs an out-of-memory body again with more, `"fail"` fails.
        enforce: `"warn"` or `"kill"` when the process as a whole passes its budget.
        priority: Higher starts first among tasks that are ready.
        wait: Fail if no device was had after this long: `"10m"`, or a number of seconds.
        cpus: CPU threads that the frameworks may start.
        learn_by: Names of parameters whose values make a history of their own.

    Returns:
        The tags, `gpu` first.

    Raises:
        PolicyError: An argument cannot be read, or contradicts another.
    """
    if caching is True or caching is False:
        caching = "on" if caching else "off"
    if isinstance(wait, (int, float)):
        wait = f"{format_number(wait)}s"
    if device is not None and not isinstance(device, (str, int)):
        device = ",".join(map(str, device))
    tags = ["gpu"]
    for key, value in {
        "memory": memory,
        "count": count,
        "device": device,
        "allocation": allocation,
        "caching": caching,
        "oom": oom,
        "enforce": enforce,
        "priority": priority,
        "wait": wait,
        "cpus": cpus,
    }.items():
        if value is not None:
            tags.append(f"gpu:{key}={value}")
    for key, several in {"framework": framework, "learn_by": learn_by}.items():
        names = (several,) if isinstance(several, str) else several or ()
        tags += [f"gpu:{key}={name}" for name in names]
    for key, option in (alloc or {}).items():
        text = format_number(option) if isinstance(option, float) else str(option)
        tags.append(f"gpu:alloc.{key}={text}")
    if exclusive is True:
        tags.append("gpu:exclusive")
    elif exclusive is not False:  # "no" is no bool: let the parser say so
        tags.append(f"gpu:exclusive={exclusive}")
    policy = parse_tags(tags)
    assert policy is not None, "the first tag is `gpu`"
    return policy.to_tags()


def tag_table_markdown() -> str:
    """Write the README's table of tags: tag, meaning and accepted values, default."""
    rows = ["| tag | meaning | default |", "|---|---|---|"]
    rows.append("| `gpu` | runs in its own process on one device; any tag below implies it | |")
    for key in _KEYS:
        rows.append(f"| {key.example} | {key.meaning} | {key.default} |")
    return "\n".join(rows) + "\n"


@dataclass(frozen=True, slots=True)
class _Key:
    """One row of the table: a key and everything that is said of it anywhere."""

    #: As in `gpu:NAME=`; `alloc` stands for all of `alloc.KEY`.
    name: str
    #: Field of `GPUPolicy` that holds its value.
    field: str
    #: Text to value; raises `ValueError` with the problem.
    read: Callable[[str], Any]
    #: Value of the field to texts, one for each tag.
    write: Callable[[Any], list[str]]
    #: What errors say would have been accepted.
    accepted: str
    #: For the README, in markdown.
    example: str
    meaning: str
    default: str
    #: May be given more than once in one source.
    repeats: bool = False
    #: A tag without a value, such as `gpu:exclusive`.
    bare: bool = False

    def tags(self, policy: GPUPolicy) -> list[str]:
        """Write the tags of this key."""
        texts = self.write(getattr(policy, self.field))
        joint = "" if self.bare else "." if self.name == "alloc" else "="
        return [f"gpu:{self.name}{joint}{text}" for text in texts]


# -- reading one source ------------------------------------------------------------------------


def _read_source(tags: Iterable[str]) -> dict[str, Any]:
    """Read the `gpu` tags of one source into values by key, `alloc.KEY` each a key of its own."""
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    for tag in tags:
        if tag.strip().lower() == "gpu":
            continue
        name, equals, text = (part.strip() for part in tag.strip()[4:].partition("="))
        name = name.lower()
        key, accepted, read = _find(tag, name)
        if key.bare and equals:
            raise PolicyError(tag, f"{name} takes no value", accepted)
        if not key.bare and not text:
            raise PolicyError(tag, f"{name} has no value", accepted)
        try:
            value = read(text)
        except (ValueError, OverflowError) as error:
            raise PolicyError(tag, str(error), accepted) from error
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


def _find(tag: str, name: str) -> tuple[_Key, str, Callable[[str], Any]]:
    """Find what reads a key, and what it accepts."""
    head, _, option = name.partition(".")
    if head == "alloc":
        if option not in ALLOCATOR_OPTIONS:
            raise _unknown(tag, "allocator option", option, "alloc.", ALLOCATOR_OPTIONS)
        return _BY_NAME["alloc"], *ALLOCATOR_OPTIONS[option]
    if name not in _BY_NAME:
        known = [key.name for key in _KEYS if key.name != "alloc"]
        known += [f"alloc.{option}" for option in ALLOCATOR_OPTIONS]
        raise _unknown(tag, "key", name, "", known)
    key = _BY_NAME[name]
    return key, key.accepted, key.read


def _unknown(tag: str, what: str, name: str, prefix: str, known: Iterable[str]) -> PolicyError:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean gpu:{prefix}{close[0]}?" if close else ""
    accepted = ", ".join(f"gpu:{prefix}{each}" for each in names)
    return PolicyError(tag, f"{name!r} is not a known {what}{hint}", accepted)


def _default_allocation(memory: object, caching: bool) -> Allocation:
    return "limit" if memory is not None and caching else "growth"


def _check_frameworks(shares: tuple[FrameworkShare, ...]) -> None:
    names = [share.name for share in shares]
    given = " with ".join(f"gpu:framework={write_share(share)}" for share in shares)
    if len(set(names)) < len(names):
        raise PolicyError(given, "one framework has two shares", "each framework once")
    if "none" in names and len(names) > 1:
        raise PolicyError(given, "none excludes every other framework", "none, or frameworks")
    fractions = [share.fraction for share in shares if share.fraction is not None]
    # Thousandths of a percent are rounding, not a share: 0.1 + 0.2 + 0.7 > 1.
    left = round(1 - math.fsum(fractions), 5)
    if left < 0:
        raise PolicyError(given, "the shares are more than 100% together", "shares up to 100%")
    if left == 0 and len(fractions) < len(shares):
        raise PolicyError(
            given, "the shares leave nothing for the framework without one", "shares below 100%"
        )


# -- the table ---------------------------------------------------------------------------------

_KEYS = (
    _Key(
        "memory",
        "memory",
        read_memory,
        write_memory,
        f"{SIZES_ACCEPTED}; or a percentage of each device above 0 and up to 100, as in 40%",
        "`gpu:memory=6GiB`, `=40%`",
        "the **budget**: bytes of the device *as NVML counts them, CUDA context included*, on each "
        "device it gets; a percentage is of that device's total",
        "learned; the first time a device to itself",
    ),
    _Key(
        "count",
        "count",
        whole(1),
        write_plain,
        "a whole number from 1, as in gpu:count=2",
        "`gpu:count=2`",
        "that many devices, all or none",
        "1",
    ),
    _Key(
        "device",
        "devices",
        read_devices,
        lambda devices: [",".join(devices)] if devices else [],
        "indices among the runner's devices or UUID prefixes, with commas, as in gpu:device=0,2 or "
        "gpu:device=GPU-1a2b",
        "`gpu:device=0,2` or a UUID prefix",
        "only these devices: the first that fits, or, with `count`, these in this order. Indices "
        "count within the runner's devices",
        "any",
    ),
    _Key(
        "framework",
        "frameworks",
        read_share,
        lambda shares: [write_share(share) for share in shares],
        f"{', '.join(FRAMEWORKS[:-1])} or none, with a share of the budget if several split it, as "
        "in torch:70%",
        "`gpu:framework=torch` (also `tensorflow`, `jax`, `cupy`, `onnxruntime`, `none`)",
        "which adapters apply the policy; may repeat, and `torch:70%` splits a shared budget",
        "those the task imports",
        repeats=True,
    ),
    _Key(
        "allocation",
        "allocation",
        word("limit", "growth", "all"),
        write_plain,
        "limit, growth or all",
        "`gpu:allocation=limit`, `growth` or `all`",
        "`limit`: cap the framework at the budget; `growth`: grow on demand, no cap, a budget is "
        "then a reservation only; `all`: the framework takes its whole budget at start",
        "`limit` with a budget, `growth` without one or with `gpu:caching=off`",
    ),
    _Key(
        "alloc",
        "allocator_options",
        lambda text: text,  # every option has its own, in `ALLOCATOR_OPTIONS`
        lambda options: [f"{name}={text}" for name, text in options],
        ", ".join(ALLOCATOR_OPTIONS),
        "`gpu:alloc.KEY=VALUE`",
        "a PyTorch allocator option: " + ", ".join(f"`{name}`" for name in ALLOCATOR_OPTIONS),
        "PyTorch's own",
    ),
    _Key(
        "caching",
        "caching",
        lambda text: word("on", "off")(text) == "on",
        lambda caching: ["on" if caching else "off"],
        "on or off",
        "`gpu:caching=off`",
        "`PYTORCH_NO_CUDA_MEMORY_CACHING=1`, for memory checkers. It disables torch's cap: with "
        "`limit` or `all` a contradiction",
        "`on`",
    ),
    _Key(
        "exclusive",
        "exclusive",
        lambda _: True,
        lambda exclusive: [""] if exclusive else [],
        "gpu:exclusive",
        "`gpu:exclusive`",
        "nobody else of ours on the device",
        "shared",
        bare=True,
    ),
    _Key(
        "oom",
        "oom",
        word("escalate", "fail"),
        write_plain,
        "escalate or fail",
        "`gpu:oom=escalate` or `fail`",
        "after an out-of-memory: run the body again in a fresh process with more, or fail",
        "`escalate`",
    ),
    _Key(
        "enforce",
        "enforce",
        word("warn", "kill"),
        write_plain,
        "warn or kill",
        "`gpu:enforce=kill` or `warn`",
        "when the process as a whole passes its budget (NVML)",
        "`warn`",
    ),
    _Key(
        "priority",
        "priority",
        whole(),
        write_plain,
        "a whole number, as in gpu:priority=5",
        "`gpu:priority=5`",
        "higher starts first among tasks that are ready",
        "0",
    ),
    _Key(
        "wait",
        "wait_s",
        read_wait,
        write_wait,
        DURATIONS_ACCEPTED,
        "`gpu:wait=10m`",
        "fail if no device was had after this long",
        "no limit",
    ),
    _Key(
        "cpus",
        "cpus",
        whole(1),
        write_plain,
        "a whole number from 1, as in gpu:cpus=4",
        "`gpu:cpus=4`",
        "CPU threads the frameworks may start",
        "cores ÷ processes running, at least 1",
    ),
    _Key(
        "learn_by",
        "learn_by",
        read_parameter,
        list,
        "a parameter's name, as in gpu:learn_by=batch_size",
        "`gpu:learn_by=batch_size`",
        "parameters whose values make a history of their own; may repeat",
        "none",
        repeats=True,
    ),
)
_BY_NAME = {key.name: key for key in _KEYS}
_DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(GPUPolicy)}

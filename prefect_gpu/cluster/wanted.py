"""How many GPUs a cluster should have for what waits, as bundles for Ray's autoscaler.

Pure. Ray takes one list of bundles for the whole cluster, each of so many GPUs of one node: the least that the cluster
should have, whether it is in use or not. So a list has what the nodes have that flows use already (`NodeGPUs`), and a
bundle for each device that is to come (`Bundles`). Who tells Ray, and when, is in `autoscaler`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from prefect_gpu.scheduling.model import Device, Request
from prefect_gpu.scheduling.probes import ALLOWANCE

#: GPUs in Ray's count of each node that a flow uses, by Ray's id of the node.
NodeGPUs: TypeAlias = Mapping[str, float]

#: How many bundles of so many GPUs are wanted, by the number of GPUs.
Bundles: TypeAlias = Mapping[int, int]

#: Most bundles of one flow. The autoscaler packs them into nodes every few seconds.
MOST_BUNDLES = 1000


def count_bundles(
    waiting: Iterable[tuple[Request, int]],
    capacities: Mapping[Device, int],
    max_tasks: int | None = None,
    most_tasks: int = sys.maxsize,
) -> Bundles:
    """Estimate the devices that requests need which wait.

    Requests with a known need share devices of the smallest size there is; where no device is known, all of them share
    one. Of requests whose need is not known, so many share one as may start at once. Each other request has its devices to
    itself. A request that names nodes, or devices of a node, waits for
    those: no new node would help it.

    Args:
        waiting: A request, and how many like it wait.
        capacities: Bytes that could be reserved on each device that is there.
        max_tasks: Most tasks on a device at a time; `None`: as many as fit.
        most_tasks: So many of them may start at most, the first ones.
    """
    smallest = min(capacities, key=capacities.__getitem__, default=None)
    bundles = Counter[int]()
    #: Devices for those that share, with parts of one.
    shared: float | None = None
    for request, number in waiting:
        if request.nodes or not all(name.isdecimal() for name in request.devices):
            continue
        number = min(number, most_tasks)
        if not number:
            break
        most_tasks -= number
        need_bytes = 0 if smallest is None else request.need_bytes(smallest)
        shares = request.probe_fraction > 0 and not request.exclusive
        known = request.memory is not None and need_bytes is not None
        if request.exclusive or request.count > 1 or not (known or shares):
            bundles[request.count] += number
            continue
        fit = max_tasks or sys.maxsize
        if not known:
            fit = min(fit, int(1 / ALLOWANCE))
        if smallest is not None and need_bytes:
            fit = min(fit, max(1, capacities[smallest] // need_bytes))
        shared = (shared or 0.0) + number / fit
    if shared is not None:
        # Eleven elevenths are a little more than one.
        bundles[1] += max(1, math.ceil(shared - 1e-9))
    left = MOST_BUNDLES
    for gpus, number in bundles.items():
        bundles[gpus] = min(number, left)
        left -= bundles[gpus]
    return {gpus: number for gpus, number in bundles.items() if number}


def add_up(reports: Iterable[tuple[NodeGPUs, Bundles]]) -> list[dict[str, float]]:
    """Return what to ask of Ray for several flows; empty: nothing waits.

    Flows share nodes, so each node counts once.
    """
    nodes: dict[str, float] = {}
    bundles = Counter[int]()
    for known, waiting in reports:
        nodes.update(known)
        bundles.update(waiting)
    if not bundles:
        return []
    new = [gpus for gpus in sorted(bundles, reverse=True) for _ in range(bundles[gpus])]
    return [{"GPU": gpus} for gpus in (*(nodes[i] for i in sorted(nodes)), *new)]

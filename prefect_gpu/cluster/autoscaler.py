"""What waits is asked of Ray's autoscaler, and the request is withdrawn at the end.

`ray.autoscaler.sdk.request_resources` sets one request for the whole cluster. A later call overwrites it, whichever
program makes it, and it outlives the program. So no flow calls it itself:

    flow's process                       head of the cluster                        Ray
    --------------                       -------------------                        ---
    `FlowRequest`, once a second   ───▶  `Keeper`, a detached actor for all   ───▶  `request_resources`
    while tasks wait: its nodes          flows: adds up what they report, drops
    and the bundles that it wants        a flow that is silent, and ends itself

- While nothing waits, and on a cluster without an autoscaler (`has_autoscaler`), there is no keeper and no call.
- Reports are plain dictionaries: a flow may have another version of this package than the one that started the keeper.
- A keeper that Ray has started again knows no flow. It withdraws nothing before they have had time to report.

What to ask for is in `wanted`. Ray itself comes as an argument from `membership`.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefect_gpu.cluster.wanted import Bundles, NodeGPUs, add_up

logger = logging.getLogger(__name__)

#: Seconds without a report after which a flow is dropped, and without any flow after which the keeper ends.
SILENT_S = 10.0

#: Seconds between two looks of the keeper at who is silent.
CHECK_S = 1.0

#: Seconds between two looks for an autoscaler, which may start after the head.
FIND_S = 10.0

#: Seconds that the last report of a flow may take.
WITHDRAW_S = 1.0

#: Name and namespace of the keeper in Ray.
KEEPER, NAMESPACE = "autoscaler-keeper", "prefect_gpu"

#: Where the autoscaler of Ray's first version writes what it does, with the type of each node.
STATUS_KEY = "__autoscaling_status"

#: Types of nodes in the status of a cluster that has no autoscaler: one for each node.
OWN_TYPE = re.compile("node_[0-9a-f]+")

#: Label of nodes that belong to a group of an autoscaler. `RAY_NODE_TYPE_NAME` sets it.
GROUP_LABEL = "ray.io/node-group"

#: Resource that only the head has.
HEAD_RESOURCE = "node:__internal_head__"


class Keeper:
    """Adds up what flows report, and asks for it. Any thread may use it.

    Args:
        ask: Is given the bundles that the cluster should have, when they change; none: nothing is asked for.
        now: Returns monotonic seconds.
    """

    def __init__(
        self, ask: Callable[[list[dict[str, float]]], object], now: Callable[[], float]
    ) -> None:
        self._ask = ask
        self._now = now
        self._lock = threading.Lock()
        #: By flow: when it last reported, its nodes, and what it wants.
        self._reports: dict[str, tuple[float, NodeGPUs, Bundles]] = {}
        #: What was asked for last; `None`: an earlier keeper may have asked for something.
        self._asked: list[dict[str, float]] | None = None
        #: When a flow was last known.
        self._known_s = now()

    def report(self, flow: str, nodes: NodeGPUs, bundles: Bundles) -> None:
        """Take what a flow wants from now on; no bundles: nothing."""
        with self._lock:
            self._known_s = self._now()
            if bundles:
                self._reports[flow] = self._known_s, nodes, bundles
            else:
                self._reports.pop(flow, None)
            self._tell()

    def check(self) -> bool:
        """Drop the flows that are silent; return whether the keeper is still needed."""
        with self._lock:
            now_s = self._now()
            for flow, (at_s, *_) in tuple(self._reports.items()):
                if now_s - at_s > SILENT_S:
                    del self._reports[flow]
            if self._reports:
                self._known_s = now_s
            elif self._asked is None and now_s - self._known_s <= SILENT_S:
                return True
            self._tell()
            return now_s - self._known_s <= SILENT_S

    def _tell(self) -> None:
        wanted = add_up((nodes, bundles) for _, nodes, bundles in self._reports.values())
        if wanted != self._asked:
            self._ask(wanted)
            self._asked = wanted


def start_keeper(ray: Any, ask: Callable[[list[dict[str, float]]], object]) -> Any:
    """Return the cluster's keeper, which is started if there is none.

    Args:
        ray: The module.
        ask: See `Keeper`.
    """

    class AutoscalerKeeper:
        def __init__(self) -> None:
            self._keeper = Keeper(ask, time.monotonic)
            threading.Thread(target=self._run, name="prefect-gpu-keeper", daemon=True).start()

        def report(self, flow: str, nodes: NodeGPUs, bundles: Bundles) -> None:
            self._keeper.report(flow, nodes, bundles)

        def _run(self) -> None:
            needed = True
            while needed:
                time.sleep(CHECK_S)  # noqa: TID251 - the actor's own process
                try:
                    needed = self._keeper.check()
                except Exception:
                    logger.exception("the autoscaler could not be asked; it is tried again")
            ray.kill(ray.get_runtime_context().current_actor)

    return (
        ray.remote(AutoscalerKeeper)
        .options(
            name=KEEPER,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            # A worker on which an actor runs is not idle, and stays.
            resources={HEAD_RESOURCE: 0.001},
        )
        .remote()
    )


def has_autoscaler(ray: Any, nodes: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a cluster has an autoscaler, as far as can be seen.

    Ray 2.60 has no function for it. Every head runs Ray's monitor. That of the first version gives each node a type of
    its own where it has no configuration. That of the second version does not tell, and the nodes' labels decide.

    Args:
        ray: The module.
        nodes: As `ray.nodes` returns them.
    """
    status = ray.experimental.internal_kv._internal_kv_get(STATUS_KEY)
    if status:
        report = json.loads(status).get("autoscaler_report") or {}
        types = (report.get("node_type_mapping") or {}).values()
        return not all(OWN_TYPE.fullmatch(each) for each in types)
    return any(node["Alive"] and GROUP_LABEL in (node.get("Labels") or {}) for node in nodes)


class FlowRequest:
    """What one flow asks of the autoscaler. For one thread at a time.

    Args:
        ray: The module, connected.
        ask: See `Keeper`.
    """

    def __init__(self, ray: Any, ask: Callable[[list[dict[str, float]]], object]) -> None:
        self._ray = ray
        self._ask = ask
        self._flow = uuid.uuid4().hex
        self._keeper: Any = None
        #: The report that the keeper has not taken yet.
        self._sent: Any = None
        self._found = False
        self._find_s = float("-inf")
        self._failure = ""

    def found(self, nodes: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the cluster has an autoscaler; see `has_autoscaler`."""
        if not self._found and time.monotonic() - self._find_s >= FIND_S:
            self._find_s = time.monotonic()
            self._found = has_autoscaler(self._ray, nodes)
        return self._found

    def report(self, nodes: Sequence[Mapping[str, Any]], used: NodeGPUs, bundles: Bundles) -> str:
        """Report what the flow wants now, and return that as text; empty: nothing was asked for.

        It does not wait for the keeper.

        Args:
            nodes: As `ray.nodes` returns them.
            used: See `wanted`.
            bundles: See `wanted`.
        """
        if not (bundles or self._keeper) or not self.found(nodes):
            return ""
        try:
            if self._sent is not None:
                if not self._ray.wait([self._sent], timeout=0)[0]:
                    return self._failure or _describe(bundles)
                sent, self._sent = self._sent, None
                self._ray.get(sent)
                self._failure = ""
            if self._keeper is None:
                self._keeper = start_keeper(self._ray, self._ask)
            self._sent = self._keeper.report.remote(self._flow, dict(used), dict(bundles))
            if not bundles:
                self._keeper = None
        except Exception as error:  # noqa: BLE001 - whatever became of the keeper
            self._keeper = None
            why = (str(error).strip() or repr(error)).splitlines()[-1]
            failure = f"the autoscaler could not be asked: {why}"
            if failure != self._failure:
                logger.warning("%s", failure)
            self._failure = failure
        return self._failure or _describe(bundles)

    def withdraw(self) -> None:
        """Report that the flow wants nothing more."""
        if self._keeper is not None:
            sent = self._keeper.report.remote(self._flow, {}, {})
            self._keeper = None
            self._ray.wait([sent], timeout=WITHDRAW_S)


def _describe(bundles: Bundles) -> str:
    gpus = sum(gpus * number for gpus, number in bundles.items())
    return f"the autoscaler was asked for {gpus} more GPU{'s' if gpus > 1 else ''}" if gpus else ""

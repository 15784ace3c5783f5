"""A dress rehearsal: everything that people run on a machine's GPUs, at the same time, for ten minutes.

- a flow that evaluates thirty architectures of timm, torchvision and transformers with random weights, on three data
  sets each, again and again, with learned budgets and `sharing="mps"`;
- a flow with tasks of JAX and TensorFlow;
- a preemptible training, all the time;
- a server of background tasks, which gets a request of priority 10 every two seconds;
- a flow with a task that leaks, one that runs out of memory, and one that writes to an illegal address as a client of MPS;
- a flow that is killed (SIGKILL) half-way, and started again.

    python benchmarks/rehearsal.py --out rehearsal.json --picture rehearsal.svg
    python benchmarks/rehearsal.py --seconds 200
    python benchmarks/rehearsal.py --tiny                  # that it runs, on the CPU

Before, each task's body runs alone, in a plain process without Prefect. Of each GPU all but `--cap` is withheld, so that
tasks must wait and the training is suspended for requests. Printed are the states of all task runs, their values against those
alone, the requests' waits, the devices' use over time, and what is left of memory and processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import _bound
import _common
import _devices
import _rehearsal_bodies as bodies
from _rehearsal_flows import SWEPT

#: Variable in which a part's processes, and those that they start, have the part's name.
PART = "PREFECT_GPU_REHEARSAL"

#: Seconds after the last request in which all must have ended, and after a kill.
ENDING_S, KILLED_S = 90.0, 5.0

#: Seconds to wait for the remaining output of a part that has ended.
OUTPUT_S = 5.0

#: Steps of the training alone.
ALONE_STEPS = 3000

#: Most that a value on a GPU may differ from that of the same body alone, as a fraction: libraries choose algorithms by measured
#: times. Values of other tasks must be the same. On the CPU sums depend on the number of threads.
TOLERANCES = {"evaluate": 1e-2, "with_jax": 1e-3, "with_tensorflow": 1e-3}
CPU_TOLERANCE = 1e-4

#: States of task runs by task, where these are not `Completed` alone.
STATES = {"run_out": {"Failed"}, "crash": {"Failed"}, "fit": {"Completed", "Cached"}}

#: Most seconds that a request waits: in the median, and of 95 %.
MEDIAN_S, MOST_S = 1.0, 20.0

#: Columns of each device in the table over time, with their units.
COLUMNS = (("busy", ""), ("most used", ", GB"), ("power", ", W"))

Calls = list[tuple[str, list[Any]]]


def key(name: str, arguments: Iterable[Any]) -> str:
    """Return the name of a call."""
    return f"{name}{json.dumps(list(arguments))}"


# What each body returns alone.


def run_alone(calls: Sequence[tuple[str, list[Any]]], device: int, found: dict[str, Any]) -> None:
    """Call bodies one after another in a plain process that sees one device, and add their values by name."""
    lines = "".join(json.dumps([name, arguments]) + "\n" for name, arguments in calls)
    done = subprocess.run(
        [sys.executable, bodies.__file__],
        input=lines,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": str(device)},
    )
    values = [line for line in done.stdout.splitlines() if line.startswith("VALUE ")]
    if len(values) != len(calls):
        raise SystemExit(f"alone: {len(values)} of {len(calls)} bodies returned: {done.stdout}")
    for (name, arguments), line in zip(calls, values, strict=True):
        found[key(name, arguments)] = value = json.loads(line[6:])
        if isinstance(value, str):
            raise SystemExit(f"alone: {key(name, arguments)} raised {value}")


def plan_alone(given: argparse.Namespace, libraries: list[str], others: list[str]) -> list[Calls]:
    """Return the calls to make alone, each list in a process of its own."""
    evaluations: Calls = [
        ("evaluate", [library, name, data, given.batches])
        for library in libraries
        for name in bodies.ARCHITECTURES[library]
        for data in range(3)
    ]
    work: Calls = [("train", [ALONE_STEPS, 0.0]), ("fit", [0])]
    work += [("answer", [number]) for number in range(1, int(given.seconds / 2) + 2)]
    lists: list[Calls] = [work]
    lists += [[(f"with_{other}", [seed]) for seed in range(6)] for other in others]
    return [*lists, *(evaluations[part::4] for part in range(4))]


def is_right(
    name: str, arguments: list[Any], value: Any, alone: dict[str, Any], on_gpu: bool
) -> bool:
    """Return whether a task run's value is that of its body alone."""
    near = TOLERANCES.get(name, 0.0) if on_gpu else CPU_TOLERANCE
    if name == "train":
        pairs = [*zip(value, alone[key(name, [ALONE_STEPS, 0.0])], strict=False)]
        return bool(pairs) and all(math.isclose(*pair, rel_tol=near) for pair in pairs)
    expected = alone.get(key(name, arguments))
    if name == "fit":
        expected = alone[key(name, [0])] + arguments[0]
    if name == "answer":
        expected = (expected or [0.0, None])[1]
    if name == "leak":
        expected = 1.0
    return isinstance(expected, float) and math.isclose(value, expected, rel_tol=near)


# The parts of the load.


@dataclass
class Part:
    """A process of the load: a flow, or the server."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    #: Ids of its flow runs.
    flow_runs: list[str] = field(default_factory=list)
    #: Name, arguments and value of each task run that returned.
    values: list[tuple[str, list[Any], Any]] = field(default_factory=list)
    #: Id, time and seconds of each request.
    waits: list[tuple[str, float, float]] = field(default_factory=list)
    killed: bool = False

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self.reader.start()

    def _read(self, stream: IO[str]) -> None:
        """Read what the process prints, to its end."""
        with self.log.open("w") as log:
            for line in stream:
                kind, _, rest = line.partition(" ")
                if kind == "FLOW":
                    self.flow_runs.append(rest.strip())
                elif kind == "VALUE":
                    self.values.append(tuple(json.loads(rest)))
                elif kind == "WAIT":
                    self.waits.append(tuple(json.loads(rest)))
                else:
                    log.write(line)


class Load:
    """Starts the parts, and reads the devices each second."""

    def __init__(self, url: str, folder: Path, until_s: float, environment: dict[str, str]) -> None:
        self._folder, self._until_s = folder, until_s
        self._environment = {**os.environ, **environment, "PREFECT_API_URL": url}
        paths = (_common.REPOSITORY, Path(__file__).parent, os.environ.get("PYTHONPATH", ""))
        self._environment["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, paths)))
        #: Distinguishes this load from another one on the machine.
        self._id = uuid.uuid4().hex
        self.parts: list[Part] = []
        self.began_s = time.time()
        #: Seconds since the begin, then for each device: utilisation, bytes in use, joules.
        self.samples: list[tuple[float, list[tuple[float, int, float]]]] = []
        self._stopped = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def start(self, name: str, *arguments: str) -> Part:
        """Start a part."""
        script = Path(__file__).with_name("_rehearsal_flows.py")
        process = subprocess.Popen(
            [sys.executable, "-u", str(script), name, str(self._until_s), *arguments],
            env={**self._environment, PART: f"{self._id}-{name}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        part = Part(name, process, self._folder / f"{name}-{len(self.parts)}.log")
        self.parts.append(part)
        return part

    def kill_half_way(self, part: Part, limit_s: float) -> int:
        """Kill the flow once half of its tasks have ended; return how many of its processes are left."""
        deadline = time.time() + limit_s
        while len(part.values) < SWEPT // 2 and time.time() < deadline:
            time.sleep(0.2)
        # One that has ended by then is not killed, and not counted as killed.
        part.killed = part.process.poll() is None
        part.process.kill()
        part.process.wait()
        return self.count_left(part.name, KILLED_S)

    def count_left(self, name: str = "", patience_s: float = 15.0) -> int:
        """Wait until no process of a part, or of any, is left; return how many are left then."""
        mark = f"{PART}={self._id}-{name}".encode()
        deadline = time.monotonic() + patience_s
        while (left := sum(mark in each for each in _environments())) > 0:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return left

    def wait(self) -> list[str]:
        """Wait until all parts have ended; kill and return those that do not, or that fail."""
        wrong = [] if any(part.killed for part in self.parts) else ["no flow was killed half-way"]
        for part in self.parts:
            try:
                part.process.wait(max(1.0, self._until_s + ENDING_S - time.time()))
            except subprocess.TimeoutExpired:
                os.killpg(part.process.pid, signal.SIGKILL)
                wrong.append(f"{part.name} did not end")
            else:
                if part.process.returncode and not part.killed:
                    wrong.append(f"{part.name} ended with {part.process.returncode}")
            # Its last lines may not be read yet.
            part.reader.join(OUTPUT_S)
        return wrong

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Kill the parts that run still, as after Ctrl-C: they have sessions of their own."""
        for part in self.parts:
            # Not what an ended part has left, which is counted.
            if part.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(part.process.pid, signal.SIGKILL)
        self._stopped.set()
        self._sampler.join()

    def _sample(self) -> None:
        handles = _devices.handles()
        while handles and not self._stopped.wait(1.0):
            import pynvml

            found = []
            for handle in handles:
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                load = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                energy = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
                found.append((load, int(memory.total - memory.free), energy))
            self.samples.append((time.time() - self.began_s, found))


def _environments() -> Iterable[bytes]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            yield path.read_bytes()
        except OSError:
            continue


# What is printed.


def read_states(url: str, flow_runs: list[str], task_runs: list[str]) -> dict[str, Counter[str]]:
    """Return the number of task runs by task and state."""
    found: dict[str, Counter[str]] = {}
    for of, ids in (("flow_runs", flow_runs), ("task_runs", task_runs)):
        for at in range(0, len(ids), 100):
            offset = 0
            while True:
                # 200 are the most that the API gives at a time.
                asked = {of: {"id": {"any_": ids[at : at + 100]}}, "limit": 200, "offset": offset}
                page = _post(f"{url}/task_runs/filter", asked)
                for run in page:
                    name = run["task_key"].partition("-")[0].rpartition(".")[2]
                    found.setdefault(name, Counter())[run["state"]["name"]] += 1
                offset += len(page)
                if len(page) < 200:
                    break
    return found


def _post(url: str, asked: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def print_timeline(samples: list[tuple[float, list[tuple[float, int, float]]]], rows: int) -> None:
    """Print each device's use over time."""
    if len(samples) < 2:
        return
    size = max(1, -(-len(samples) // rows))
    table = []
    for at in range(0, len(samples) - 1, size):
        some = samples[at : at + size + 1]
        cells = [f"{some[0][0]:.0f} to {some[-1][0]:.0f}"]
        for device in range(len(some[0][1])):
            each = [sample[1][device] for sample in some]
            watts = (each[-1][2] - each[0][2]) / max(0.1, some[-1][0] - some[0][0])
            cells += [
                f"{statistics.fmean(load for load, _, _ in each):.0%}",
                f"{max(used for _, used, _ in each) / 1e9:.1f}",
                f"{watts:.0f}",
            ]
        table.append(cells)
    devices = range(len(samples[0][1]))
    head = [f"{of} {i}{unit}" for i in devices for of, unit in COLUMNS]
    _common.print_table(["seconds", *head], table)
    whole = [(samples[-1][1][i][2] - samples[0][1][i][2]) / 1000 for i in devices]
    busy = [statistics.fmean(sample[1][i][0] for sample in samples) for i in devices]
    for i in devices:
        print(f"device {i}: busy for {busy[i]:.0%} of the time, {whole[i]:.1f} kJ")


def draw(found: dict[str, Any]) -> str:
    """Return a picture of the devices' use and the requests' waits, as SVG."""
    from prefect_gpu.reports import canvas as c

    samples, waits = found["samples"], found["waits"]
    devices = len(samples[0][1]) if samples else 0
    width, lane, left = 920.0, 110.0, 60.0
    picture = c.Canvas(width, 60 + lane * (devices + 1) + 30, "A rehearsal on GPUs")
    end_s = max([10.0, *(sample[0] for sample in samples)])

    def x_of(at_s: float) -> float:
        return left + (width - left - 20) * min(1.0, at_s / end_s)

    picture.text(
        20, 30, "Evaluations, a training, requests, faults and a killed flow at once", bold=True
    )
    most = max([1, *(used for _, each in samples for _, used, _ in each)])
    for i in range(devices):
        top = 60 + lane * i
        floor = top + lane - 30
        picture.text(
            20,
            top + 4,
            f"device {i}: busy (area), memory in use (line), 0 to {most / 1e9:.0f} GB",
            size=11,
        )
        points = [(x_of(s[0]), floor - (lane - 45) * s[1][i][0]) for s in samples]
        picture.area([(left, floor), *points, (x_of(end_s), floor)], c.LIVE, 0.35)
        line = [(x_of(s[0]), floor - (lane - 45) * s[1][i][1] / most) for s in samples]
        picture.line(line, c.BUDGET, width=1.5)
    top = 60 + lane * devices
    floor = top + lane - 30
    longest = max([1.0, *(wait for _, _, wait in waits)])
    picture.text(
        20, top + 4, f"requests: seconds until the first line, 0 to {longest:.1f} s", size=11
    )
    for _, at_s, wait in waits:
        picture.dot(x_of(at_s - found["began_s"]), floor - (lane - 45) * wait / longest, c.INK)
    for at_s, label in c.time_ticks(end_s):
        picture.text(x_of(at_s), floor + 20, label, size=11, anchor="middle")
    return picture.svg()


def main() -> None:
    """Run the rehearsal, print what came of it, and judge it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of the load")
    parser.add_argument("--batches", type=int, default=20, help="of each evaluation")
    parser.add_argument("--cap", type=float, default=40.0, help="GB of each GPU that may be used")
    parser.add_argument("--out", type=Path, help="write what was found here, as JSON")
    parser.add_argument("--logs", type=Path, help="keep the logs of the parts in this folder")
    parser.add_argument("--picture", type=Path, help="write a picture here, as SVG")
    parser.add_argument("--tiny", action="store_true", help="that it runs, without a GPU")
    given = parser.parse_args()
    devices = {} if given.tiny else _devices.nvidia()
    if given.tiny:
        given.seconds, given.batches = min(given.seconds, 40.0), 1
    elif not devices:
        raise SystemExit("no GPU: --tiny tries it out on the CPU")
    libraries = [name for name in bodies.ARCHITECTURES if _common.installed(name)]
    if len(libraries) > 1 and devices:
        libraries.remove("torch")
    others = [name for name in ("jax", "tensorflow") if _common.installed(name)]
    if given.tiny:
        libraries, others = ["torch"], []
    versions = _common.versions("torch", "tensorflow", "jax", "timm", "transformers")
    print(json.dumps({"versions": versions, **devices}), flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as kept:
        folder = given.logs or Path(kept)
        folder.mkdir(parents=True, exist_ok=True)
        found = rehearse(given, folder, libraries, others, len(devices.get("devices", [])))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.picture:
        given.picture.write_text(draw(found), encoding="utf-8")
    sys.exit(any(not check.passed for check in judge(found, given)))


def rehearse(
    given: argparse.Namespace, folder: Path, libraries: list[str], others: list[str], devices: int
) -> dict[str, Any]:
    """Run all bodies alone and then the load; return what was found."""
    alone: dict[str, Any] = {}
    lists = plan_alone(given, libraries, others)
    with ThreadPoolExecutor(len(lists)) as pool:
        runs = [
            pool.submit(run_alone, calls, i % max(1, devices), alone)
            for i, calls in enumerate(lists)
        ]
    for run in runs:
        run.result()
    _common.say(f"alone: {len(alone)} of {sum(map(len, lists))} bodies have returned")
    before, environment = _devices.used_bytes(), {}
    if devices:
        withheld = _devices.headroom(_devices.usable_bytes(), int(given.cap * 1e9))
        environment["PREFECT_INTEGRATIONS_GPU_HEADROOM"] = withheld
    else:
        environment["PREFECT_INTEGRATIONS_GPU_DEVICES"] = "simulated:2x40GB"
    with _common.prefect_server() as url:
        _common.say("the server is there")
        until_s = time.time() + given.seconds
        with Load(url, folder, until_s, environment) as load:
            for name in ("server", "requests", "training"):
                load.start(name)
            load.start("evaluations", str(given.batches), *libraries)
            if others:
                load.start("frameworks", *others)
            swept = load.start("sweep")
            time.sleep(given.seconds / 5)
            if devices:
                load.start("troubles")
            killed_left = load.kill_half_way(swept, given.seconds / 2)
            _common.say(f"a flow is killed after {len(swept.values)} values, and started again")
            load.start("sweep")
            wrong = load.wait()
            _common.say("all parts have ended")
            flow_runs = [run for part in load.parts if not part.killed for run in part.flow_runs]
            waits = [wait for part in load.parts for wait in part.waits]
            states = read_states(url, flow_runs, [wait[0] for wait in waits])
    values = [value for part in load.parts for value in part.values]
    names = {"answer", "evaluate", "fit", "train", *(f"with_{other}" for other in others)}
    names |= {"crash", "leak", "run_out"} if devices else set()
    return {
        "wrong": wrong,
        "missing": sorted(names - states.keys()),
        # Without the killed flow, whose states Prefect's server does not learn.
        "told": Counter(
            name for part in load.parts if not part.killed for name, _, _ in part.values
        ),
        "states": {name: dict(counts) for name, counts in sorted(states.items())},
        "values": Counter(name for name, _, _ in values),
        "wrong_values": [
            [name, arguments, value, alone.get(key(name, arguments))]
            for name, arguments, value in values
            if not is_right(name, arguments, value, alone, bool(devices))
        ],
        "waits": waits,
        "killed_left": killed_left,
        "processes_left": load.count_left(),
        "left_bytes": _devices.settled_difference_bytes(before) if devices else 0,
        "began_s": load.began_s,
        "samples": load.samples,
    }


def judge(found: dict[str, Any], given: argparse.Namespace) -> list[_bound.Check]:
    """Print what was found, and the verdicts."""
    of_values = Counter(name for name, *_ in found["wrong_values"])
    table = [
        [
            name,
            ", ".join(f"{count} {state}" for state, count in sorted(states.items())),
            f"{found['values'].get(name, 0) - of_values[name]} of {found['values'].get(name, 0)}",
        ]
        for name, states in found["states"].items()
    ]
    print()
    _common.print_table(["task", "task runs", "values as alone"], table)
    for name, arguments, value, expected in found["wrong_values"][:10]:
        print(f"{key(name, arguments)}: {str(value)[:200]}, alone {str(expected)[:200]}")
    print()
    print_timeline(found["samples"], 12)
    waits = sorted(wait for _, _, wait in found["waits"]) or [math.inf]
    print(f"{len(found['waits'])} requests waited {_common.spread(waits, 2)} s\n")
    unexpected = sum(
        count
        for name, states in found["states"].items()
        for state, count in states.items()
        if state not in STATES.get(name, {"Completed"})
    )
    lost = sum(
        max(0, states.get("Completed", 0) + states.get("Cached", 0) - found["told"].get(name, 0))
        for name, states in found["states"].items()
    )
    checks = [
        _bound.Check("tasks without a run", len(found["missing"]), 0),
        _bound.Check("completed task runs without a value", lost, 0),
        _bound.Check("parts that did not end well", len(found["wrong"]), 0),
        _bound.Check("task runs in an unexpected state", unexpected, 0),
        _bound.Check("values other than alone", len(found["wrong_values"]), 0),
        _bound.Check("processes of the killed flow, 5 s later", found["killed_left"], 0),
        _bound.Check("processes left", found["processes_left"], 0),
        _bound.Check("memory left", found["left_bytes"] / _devices.MIB, 0, "MiB"),
    ]
    if not given.tiny:
        late = waits[math.ceil(0.95 * len(waits)) - 1]
        checks += [
            _bound.Check("requests' wait, median", statistics.median(waits), MEDIAN_S, "s"),
            _bound.Check("requests' wait, 95 %", late, MOST_S, "s"),
        ]
    print(*found["wrong"], *checks, sep="\n")
    return checks


if __name__ == "__main__":
    main()

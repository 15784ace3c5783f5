"""What JAX takes of a device beside its pool, and when: the part of a process that no cap covers.

    python -m tests.gpu.check_jax_context

A plain program (no task, no runner) takes its pool at the start, and then does one thing after another that a training
does. Meanwhile a thread reads what NVML shows for the process every 2 ms. It runs twice, the second time without XLA's
search for the fastest kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.gpu._checks import MIB, ROOT, installed, nvml_handles, own_bytes, say, size, table

#: Seconds between two readings.
INTERVAL_S = 0.002

#: More than this beside the pool is not known of JAX.
MOST_BYTES = 1024 * MIB

VARIANTS = {"as it is": "", "no autotuning": "--xla_gpu_autotune_level=0"}


class Watch(threading.Thread):
    """Keeps the most that NVML showed for this process since it was last asked."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._peak = 0

    def run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            seen = own_bytes()
            with self._lock:
                self._peak = max(self._peak, seen)

    def take(self) -> int:
        with self._lock:
            peak, self._peak = self._peak, 0
        return peak


def stages() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what is done one after another: its name, and what does it."""
    import jax
    import jax.numpy as jnp
    import optax

    wide, batch = 4096, 8192
    kept: dict[str, Any] = {}

    def loss_of(weights: Any, rows: Any) -> Any:
        found = rows
        for weight in weights:
            found = jnp.tanh(found @ weight)
        return jnp.mean((found - rows) ** 2)

    def make_rows() -> Any:
        kept["rows"] = jax.random.normal(jax.random.key(0), (batch, wide))
        return kept["rows"]

    def make_weights() -> Any:
        keys = jax.random.split(jax.random.key(1), 4)
        kept["weights"] = [jax.random.normal(key, (wide, wide)) / wide**0.5 for key in keys]
        return kept["weights"]

    def differentiate() -> Any:
        kept["gradients"] = jax.jit(jax.grad(loss_of))(kept["weights"], kept["rows"])
        return kept["gradients"]

    def update() -> Any:
        adam = optax.adam(1e-4)
        state = adam.init(kept["weights"])
        return jax.jit(adam.update)(kept["gradients"], state)[0]

    yield "the first array", lambda: jnp.ones(8)
    yield "random numbers", make_rows
    yield "random weights", make_weights
    yield "one product, as it is", lambda: kept["rows"] @ kept["weights"][0]
    yield "one product, compiled", lambda: jax.jit(jnp.matmul)(kept["rows"], kept["weights"][1])
    yield "four layers, compiled", lambda: jax.jit(loss_of)(kept["weights"], kept["rows"])
    yield "gradients, compiled", differentiate
    yield "an update of Adam, compiled", update
    yield "gradients, again", differentiate


def work() -> int:
    """Do all of it, in the process that is watched; print a line for each stage."""
    import jax

    watch = Watch()
    watch.start()
    for name, do in stages():
        watch.take()
        jax.block_until_ready(do())
        stats = jax.local_devices()[0].memory_stats()
        pool = int(stats.get("pool_bytes", stats["bytes_limit"]))
        print(json.dumps([name, watch.take(), own_bytes(), pool]), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", action="store_true", help="be the process that is watched")
    if parser.parse_args().work:
        return work()
    if not nvml_handles() or not installed("jax") or not installed("optax"):
        say("NOT AS IT SHOULD BE\n- an NVIDIA device, jax and optax are needed")
        return 1
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.check_jax_context", "--work"],
            env={**os.environ, "XLA_FLAGS": flags, "XLA_CLIENT_MEM_FRACTION": "0.05"},
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        for name, flags in VARIANTS.items()
    }
    problems, rows = [], []
    for name, process in running.items():
        output, _ = process.communicate(timeout=120)
        found = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
        for stage, peak, after, pool in found:
            rows.append((name, stage, size(peak - pool), size(after - pool), size(pool)))
        most = max((peak - pool for _, peak, _, pool in found), default=0)
        if process.returncode or not found:
            problems.append(f"{name}: it ended with {process.returncode}")
        elif most > MOST_BYTES:
            problems.append(f"{name}: {size(most)} MiB beside its pool")
    table(["XLA", "stage", "most-beside-pool", "after-it", "pool"], rows)
    say("sizes in MiB, as NVML shows them for the process, less JAX's pool")
    say("NOT AS IT SHOULD BE" if problems else "all as it should be")
    for problem in problems:
        say(f"- {problem}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

"""The use of NVIDIA's Multi-Process Service by one runner. `processes.mps` has the daemon, and the variables of clients."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from prefect_gpu.devices.reader import DeviceReader
from prefect_gpu.devices.shared_folder import shared_folder
from prefect_gpu.errors import PolicyError
from prefect_gpu.policy import GPUPolicy
from prefect_gpu.processes.mps import MpsDaemon, MpsError


def check_compute(policy: GPUPolicy, sharing: str) -> None:
    """Raise `PolicyError` if a task has `gpu:compute` and its runner shares GPUs by time."""
    if policy.compute is not None and sharing != "mps":
        raise PolicyError(
            f"gpu:compute={policy.compute * 100:.6g}%",
            "tasks of this runner share a GPU by time",
            'no gpu:compute, or GPUTaskRunner(sharing="mps")',
        )


class MpsUse:
    """Joins the daemon for the first task. Safe to use from several threads; `warn` is called once, if MPS cannot be used."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        #: Guards all below; held while the daemon starts.
        self._lock = threading.Lock()
        self._daemon: MpsDaemon | None = None
        #: Whether the daemon could not be used.
        self._failed = False

    def pipes(self, reader: DeviceReader) -> str | None:
        """Return the folder by which clients find the daemon; `None`: MPS cannot be used with these devices."""
        with self._lock:
            if not self._failed:
                try:
                    if self._daemon is not None:
                        self._daemon.revive()
                        return self._daemon.pipes
                    if problem := reader.mps_refusal():
                        raise MpsError(problem)
                    folder = shared_folder(None).path / "mps"
                    self._daemon = MpsDaemon(str(folder), os.environ)
                    return self._daemon.pipes
                except (MpsError, OSError) as error:
                    self._failed = True
                    self._warn(
                        f"sharing='mps' has no effect: {error}. Tasks on a GPU compute by turns."
                    )
            return None

    def leave(self) -> None:
        """Stop using the daemon; without effect if it was not used."""
        with self._lock:
            if self._daemon is not None:
                self._daemon.leave()

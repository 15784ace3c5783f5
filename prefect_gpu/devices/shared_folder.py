"""A folder that all processes of a machine share, with files that a process holds (locks) until its end.

The kernel releases a file at any end of its process, also in another container or of another user. A stopped process
(`SIGSTOP`, a debugger, a frozen container) still holds its files. Therefore each process sends heartbeats: it updates
the modification time of its files. Functions raise `OSError` if a file cannot be opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from prefect_gpu.process_resources import PROCESS_RESOURCES

#: File systems that several hosts share, where SQLite's WAL mode does not work. Without the prefix "fuse.".
# fmt: off
NETWORK_FILE_SYSTEMS = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p", "lustre", "gpfs", "beegfs", "ceph", "ceph-fuse",
    "glusterfs", "panfs", "pvfs2", "wekafs", "juicefs", "sshfs", "s3fs", "gcsfuse", "rclone",
})
# fmt: on

#: Seconds without a heartbeat after which the process that holds a file counts as stopped.
SILENT_S = 2.0

#: Least checks that find the same heartbeat: right after a pause of the whole machine every heartbeat is old.
SILENT_LOOKS = 3

#: Seconds between two heartbeats of a process.
BEAT_S = 0.25

#: Seconds that `SharedFolder.locked` waits. Unless stopped, other processes keep the lock under a millisecond.
LOCKED_S = 5.0


def default_folder() -> Path:
    """Return the default folder of this user: on a local disk, and the same in every login session."""
    return Path("/var/tmp") / f"prefect-gpu-{os.getuid()}"


def read_namespace() -> str:
    """Return the PID namespace of this process, within which process ids are unique; empty: not known."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class Hold:
    """A lock on a file, which this process alone holds. A fork of the process does not hold it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self._time_ns = 0
        # Otherwise a fork would hold the file after the end of this process.
        PROCESS_RESOURCES.after_fork(self, Hold.release)

    @property
    def held(self) -> bool:
        """Whether the file is still held. After a release the descriptor may belong to another file."""
        return self._close.alive

    def release(self) -> None:
        """Release the lock and close the file."""
        self._close()

    def beat(self) -> None:
        """Send a heartbeat: update the modification time of the file."""
        if not self.held:
            return
        # Set explicitly: the kernel's own time stamps advance in steps of some milliseconds.
        self._time_ns = max(self._time_ns + 1, time.time_ns())
        # If it fails, other processes count this one as stopped, which delays nothing here.
        with contextlib.suppress(OSError):
            try:
                os.utime(self.descriptor, ns=(self._time_ns, self._time_ns))
            except PermissionError:
                # The file belongs to another user: only the current time may be set.
                os.utime(self.descriptor)


class SharedFolder:
    """A folder on a local disk with files that processes hold. Safe to use from several threads.

    Without a `path` it is `default_folder()`, which is made for this user alone. A named folder must exist; its
    permissions say who may write there. `now` returns monotonic seconds.
    """

    def __init__(self, path: Path | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.path = _private_folder() if path is None else path
        _refuse_network(self.path)
        shared = bool(self.path.stat().st_mode & stat.S_IWGRP)
        #: Mode of the files: for the user, or for the folder's group too.
        self._mode = 0o660 if shared else 0o600
        self._now = now
        self._reset()
        PROCESS_RESOURCES.after_fork(self, SharedFolder._reset)

    def _reset(self) -> None:
        #: Guards all below.
        self._lock = threading.Lock()
        self._holds: weakref.WeakSet[Hold] = weakref.WeakSet()
        self._beat_s = -BEAT_S
        #: By file name: modification time in ns, monotonic seconds of the first check that found it, number of these
        #: checks.
        self._seen: dict[str, tuple[int, float, int]] = {}

    def make_file(self, name: str) -> None:
        """Create a file in the folder unless it exists. An existing file is not opened; `OSError`: it is no plain file.

        A process that closes one of several descriptors of a file loses the locks that SQLite has on the file.
        """
        with contextlib.suppress(FileExistsError):
            self._make(name)
        if not stat.S_ISREG(os.lstat(self.path / name).st_mode):
            raise OSError(f"{self.path / name} is no plain file")

    def _make(self, name: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(self.path / name, flags, self._mode)
        try:
            # The umask may have removed the group's permissions.
            os.fchmod(descriptor, self._mode)
        finally:
            os.close(descriptor)

    def open_file(self, name: str) -> int:
        """Open a file of the folder, created if needed, and return its descriptor; `OSError`: it is a link."""
        while True:
            try:
                return os.open(self.path / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                # With the sticky bit the kernel may refuse `O_CREAT` for another user's file (`fs.protected_regular`).
                with contextlib.suppress(FileExistsError):
                    self._make(name)

    def hold(self, name: str) -> Hold | None:
        """Lock a file of the folder and return the lock; `None`: another process, or this one, has locked it."""
        for _ in range(10):
            descriptor = self.open_file(name)
            if not _try_lock(descriptor):
                os.close(descriptor)
                return None
            try:
                is_there = os.path.samestat(os.lstat(self.path / name), os.fstat(descriptor))
            except OSError:
                is_there = False
            if is_there:
                hold = Hold(descriptor)
                hold.beat()
                with self._lock:
                    self._holds.add(hold)
                return hold
            # The last holder removed the file after this process had opened it.
            os.close(descriptor)
        raise OSError(f"{self.path / name} is removed or replaced again and again")

    def hold_one(self, name: str, most: int) -> Hold | None:
        """Lock one of `most` files, as a semaphore of all processes of the machine; `None`: all files are locked."""
        return next((held for at in range(most) if (held := self.hold(f"{name} {at}"))), None)

    def is_held(self, name: str) -> bool:
        """Return whether a process holds a file. A file that no process holds is removed."""
        if name != os.path.basename(name):
            # Another user may have written the name to have an outside file removed.
            return False
        path = self.path / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            if not _try_lock(descriptor):
                return True
            # From a folder with the sticky bit only its owner may remove a file.
            with contextlib.suppress(OSError):
                path.unlink()
            # A fork made meanwhile has the open file, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            return False
        finally:
            os.close(descriptor)

    def beat(self) -> None:
        """Send a heartbeat for each file that this process holds; at most one each `BEAT_S` seconds."""
        now_s = self._now()
        with self._lock:
            if now_s - self._beat_s < BEAT_S:
                return
            self._beat_s = now_s
            holds = list(self._holds)
        for hold in holds:
            hold.beat()

    def is_silent(self, name: str) -> bool:
        """Return whether the process that holds a file has sent no heartbeat for `SILENT_S` seconds.

        The time is measured between repeated calls, so clocks of other processes do not matter.
        """
        now_s = self._now()
        with self._lock:
            try:
                time_ns = os.stat(self.path / name, follow_symlinks=False).st_mtime_ns
            except OSError:
                self._seen.pop(name, None)
                return False
            seen_ns, since_s, looks = self._seen.get(name, (time_ns, now_s, 0))
            if seen_ns != time_ns:
                since_s, looks = now_s, 0
            self._seen[name] = time_ns, since_s, looks + 1
            return looks + 1 >= SILENT_LOOKS and now_s - since_s > SILENT_S

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold a lock of all processes of the machine in a `with` block; `OSError`: not free for `LOCKED_S` seconds."""
        descriptor = self.open_file(name)
        pause = threading.Event()
        until_s = time.monotonic() + LOCKED_S
        try:
            while not _try_lock(descriptor):
                if time.monotonic() > until_s:
                    raise OSError(
                        f"another process has kept the lock {name!r} in {self.path} for more than "
                        f"{LOCKED_S:g} s; it may be stopped"
                    )
                pause.wait(0.001)
            try:
                yield
            finally:
                # A fork made meanwhile has the open file, too, and would keep the lock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def shared_folder(path: Path | None) -> SharedFolder:
    """Return the one `SharedFolder` of this process for a path; `None`: the default folder."""
    return PROCESS_RESOURCES.get(("shared folder", folder_key(path)), lambda: SharedFolder(path))


def folder_key(path: Path | None) -> str:
    """Return a key that is equal for all paths of a folder; `None`: the default folder."""
    return os.path.realpath(default_folder() if path is None else path)


def _private_folder() -> Path:
    """Make the default folder, or raise `OSError` if it does not belong to this user alone."""
    folder = default_folder()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(
            f"{folder} is not a folder that belongs to this user alone; remove it, or name another with "
            f"PREFECT_INTEGRATIONS_GPU_LEDGER"
        )
    return folder


def _refuse_network(folder: Path) -> None:
    """Raise `OSError` if a folder is on a network file system."""
    try:
        resolved = folder.resolve(strict=True)
    except RuntimeError as error:
        # A loop of links, before Python 3.13.
        raise OSError(str(error)) from error
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    system = next((mounts[at] for at in (resolved, *resolved.parents) if at in mounts), "")
    if system.removeprefix("fuse.") in NETWORK_FILE_SYSTEMS:
        raise OSError(
            f"{folder} is on a network file system ({system}); name a folder on a local disk with "
            f"PREFECT_INTEGRATIONS_GPU_LEDGER"
        )

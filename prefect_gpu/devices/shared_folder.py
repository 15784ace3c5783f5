"""A folder that all processes of a machine share, and files in it that a process holds for as long as it lives.

The kernel ends a hold when its process ends, in whatever way, also in another container or of another user.
Nothing is left to clean up, and nothing depends on process ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil

from prefect_gpu.process_resources import PROCESS_RESOURCES

#: File systems on which several hosts see one file: SQLite's WAL mode does not work there.
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "afs",
        "9p",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "glusterfs",
    }
)


def default_folder() -> Path:
    """Return the folder of this user: on a local disk, and the same in every login session."""
    return Path("/var/tmp") / f"prefect-gpu-{os.getuid()}"


def read_namespace() -> str:
    """Return the PID namespace of this process: process ids mean the same in one of them alone. Empty: not known."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class Hold:
    """A file that this process holds, and no other. A fork of the process does not hold it."""

    def __init__(self, descriptor: int) -> None:
        #: Of the file.
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        # A fork would hold it after this process has ended.
        PROCESS_RESOURCES.after_fork(self, Hold.release)

    @property
    def held(self) -> bool:
        """Whether it was not released, here or by a fork: the descriptor may be another file's then."""
        return self._close.alive

    def release(self) -> None:
        """Hold the file no longer."""
        self._close()


class SharedFolder:
    """A folder on a local disk.

    Args:
        path: Where it is; `None`: `default_folder()`, which is made for this user alone. One that was named must
            be there; who may write to it is up to its permissions.

    Raises:
        OSError: It cannot be used.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = _private_folder() if path is None else path
        _refuse_network(self.path)
        shared = bool(self.path.stat().st_mode & stat.S_IWGRP)
        #: Who may use the files: the user, or the folder's group too.
        self._mode = 0o660 if shared else 0o600

    def open_file(self, name: str) -> int:
        """Open a file of the folder, made if there is none, and return its descriptor.

        Raises:
            OSError: It cannot be opened, or it is a link.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path / name, flags, self._mode)
        if os.fstat(descriptor).st_uid == os.getuid():
            # The umask may have taken the group's right.
            os.fchmod(descriptor, self._mode)
        return descriptor

    def hold(self, name: str) -> Hold | None:
        """Hold a file of the folder; `None`: another process, or another part of this one, holds it.

        Raises:
            OSError: It cannot be opened.
        """
        descriptor = self.open_file(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return Hold(descriptor)

    def hold_one(self, name: str, most: int) -> Hold | None:
        """Hold one of a number of files: what the processes of a machine may have so many of at a time.

        Returns:
            `None`: all are held.

        Raises:
            OSError: They cannot be opened.
        """
        return next((held for at in range(most) if (held := self.hold(f"{name} {at}"))), None)

    def is_held(self, name: str) -> bool:
        """Return whether a process that lives holds a file. One that is not held is removed: names are used once.

        Raises:
            OSError: It cannot be opened.
        """
        if name != os.path.basename(name):
            # Another user wrote it, to have a file elsewhere removed.
            return False
        path = self.path / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Wait until no other process is in such a block of the same name.

        Raises:
            OSError: The lock cannot be had.
        """
        descriptor = self.open_file(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def shared_folder(path: Path | None) -> SharedFolder:
    """Return the folder of a path, one for each path in a process; see `SharedFolder`."""
    return PROCESS_RESOURCES.get(("shared folder", path), lambda: SharedFolder(path))


def _private_folder() -> Path:
    """Make the default folder, or check that it is this user's alone.

    Raises:
        OSError: It is not.
    """
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
    """Check that a folder is on a local disk.

    Raises:
        OSError: It is on a network file system.
    """
    try:
        resolved = folder.resolve(strict=True)
    except RuntimeError as error:
        # A loop of links, before Python 3.13.
        raise OSError(str(error)) from error
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    for parent in (resolved, *resolved.parents):
        if parent in mounts:
            if mounts[parent] in NETWORK_FILE_SYSTEMS:
                raise OSError(
                    f"{folder} is on a network file system ({mounts[parent]}); name a folder on a local disk with "
                    f"PREFECT_INTEGRATIONS_GPU_LEDGER"
                )
            return

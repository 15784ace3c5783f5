"""A folder that processes of several users share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prefect_gpu.clock import FakeClock
from prefect_gpu.devices import shared_folder
from prefect_gpu.devices.shared_folder import BEAT_S, SILENT_S, SharedFolder

Patch = pytest.MonkeyPatch


def test_a_name_that_leads_elsewhere_removes_no_file_there(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    precious = tmp_path / "precious.lock"
    precious.touch()
    folder = SharedFolder(tmp_path / "shared")
    assert not folder.is_held("../precious.lock")
    assert not folder.is_held(str(precious))
    assert precious.exists()


def test_a_file_that_is_held_stays_and_another_is_removed(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path)
    hold = folder.hold("a")
    assert hold is not None and folder.is_held("a")
    hold.release()
    assert not folder.is_held("a")
    assert not (tmp_path / "a").exists()


def test_a_file_removed_before_its_lock_is_made_again(tmp_path: Path, monkeypatch: Patch) -> None:
    lock = shared_folder._try_lock
    tries: list[bool] = []

    def lock_what_was_removed(descriptor: int) -> bool:
        if not tries:
            (tmp_path / "a").unlink()
        tries.append(lock(descriptor))
        return tries[-1]

    monkeypatch.setattr(shared_folder, "_try_lock", lock_what_was_removed)
    folder = SharedFolder(tmp_path)
    hold = folder.hold("a")
    assert hold is not None and tries == [True, True]
    assert folder.is_held("a")


def test_a_file_that_cannot_be_removed_is_not_held(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "a").touch()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("the folder has the sticky bit")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert not SharedFolder(tmp_path).is_held("a")


def test_a_file_is_made_without_opening_another(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = SharedFolder(tmp_path)
    folder.make_file("a")
    opened: list[object] = []
    really_open = os.open

    def note(path: os.PathLike[str], flags: int, mode: int = 0o777) -> int:
        descriptor = really_open(path, flags, mode)
        opened.append(path)
        return descriptor

    monkeypatch.setattr(os, "open", note)
    folder.make_file("a")
    assert not opened
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="no plain file"):
        folder.make_file("link")


def test_the_lock_of_a_stopped_process_is_waited_for(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(shared_folder, "LOCKED_S", 0.02)
    folder = SharedFolder(tmp_path)
    said = r"has kept the lock 'it' in .* for more than 0.02 s"
    with (
        SharedFolder(tmp_path).locked("it"),
        pytest.raises(OSError, match=said),
        folder.locked("it"),
    ):
        pass
    with folder.locked("it"):
        pass


# Heartbeats.


def test_a_fork_made_under_a_lock_does_not_keep_it(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path)
    reading, writing = os.pipe()
    with folder.locked("a name"):
        pid = os.fork()
        if pid == 0:
            # Until the test closes its end of the pipe.
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    try:
        held = folder.hold("a name")
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(pid, 0)
    assert held is not None


def test_a_process_that_sends_no_heartbeats_is_silent_until_it_does(tmp_path: Path) -> None:
    clock = FakeClock()
    works, looks = (SharedFolder(tmp_path, clock.now) for _ in range(2))
    hold = works.hold("a")
    assert hold is not None

    def seen_silent(seconds: float, beats: bool) -> bool:
        """Return whether it is found silent after a time in which it was looked at each quarter of a second."""
        for _ in range(round(seconds / BEAT_S)):
            clock.advance(BEAT_S)
            if beats:
                works.beat()
            silent = looks.is_silent("a")
        return silent

    assert not seen_silent(3 * SILENT_S, beats=True)
    assert not seen_silent(SILENT_S, beats=False)
    assert seen_silent(2 * BEAT_S, beats=False)
    assert not seen_silent(BEAT_S, beats=True)
    hold.release()
    assert not looks.is_held("a")
    assert not looks.is_silent("a"), "nobody has it"


def test_after_a_pause_of_the_whole_machine_nobody_is_silent_at_once(tmp_path: Path) -> None:
    clock = FakeClock()
    works, looks = (SharedFolder(tmp_path, clock.now) for _ in range(2))
    hold = works.hold("a")
    assert hold is not None and not looks.is_silent("a")
    clock.advance(100 * SILENT_S)
    assert not looks.is_silent("a")
    works.beat()
    assert not looks.is_silent("a")


def test_a_file_of_another_user_takes_the_current_time(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = SharedFolder(tmp_path)
    hold = folder.hold("a")
    assert hold is not None
    os.utime(tmp_path / "a", (0, 0))
    set_time = os.utime

    def refuse(descriptor: int, *, ns: tuple[int, int] | None = None) -> None:
        if ns is not None:
            raise PermissionError("its owner alone may choose")
        set_time(descriptor)

    monkeypatch.setattr(os, "utime", refuse)
    hold.beat()
    assert (tmp_path / "a").stat().st_mtime > 0

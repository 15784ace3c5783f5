"""Lines at the lower end of a terminal, below all other text: on a real pseudo-terminal."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import rich
from prefect.logging.handlers import PrefectConsoleHandler
from rich.live import Live

from prefect_gpu.live.progress import FlowProgress, RunCounts
from prefect_gpu.live.view import LiveView, LowerLines, open_lower_lines
from tests.fakes.terminal import Terminal

VIEW = ["first line of the view", "second line of the view"]


class Streams:
    """A terminal of 60 columns with the two streams of a program."""

    def __init__(self) -> None:
        self.terminal = Terminal(columns=60, rows=20)
        self.out, self.err = self.stream(), self.stream()

    def stream(self) -> io.TextIOWrapper:
        return open(os.dup(self.terminal.slave), "w", buffering=1, encoding="utf-8")

    def lines(self) -> LowerLines:
        lines = open_lower_lines(self.out, self.err)
        assert lines is not None
        return lines

    def end(self) -> None:
        """End the program."""
        self.out.close()
        self.err.close()
        self.terminal.close()

    def seen(self) -> list[str]:
        """End the program and return what is on the screen, without empty lines."""
        self.end()
        return [line for line in self.terminal.screen() if line]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    monkeypatch.setenv("TERM", "xterm")
    made = Streams()
    yield made
    made.end()


def test_text_goes_above_the_lines_which_are_gone_at_the_end(streams: Streams) -> None:
    lines = streams.lines()
    print("before", file=streams.out)
    lines.show(VIEW)
    print("printed", file=streams.out)
    print("an error", file=streams.err)
    lines.show([*VIEW, "third"])
    print("\x1b[31mred\x1b[0m", file=streams.out)
    lines.close()
    lines.close()
    print("after", file=streams.out)
    assert streams.seen() == ["before", "printed", "an error", "red", "after"]
    assert "third" in streams.terminal.text and "\x1b[31mred\x1b[0m" in streams.terminal.text


@pytest.mark.parametrize("closes", [False, True])
def test_a_terminal_that_has_gone_ends_the_view_without_an_error(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    def gone(descriptor: int) -> os.terminal_size:
        raise OSError(errno.EIO, "Input/output error")

    lines = streams.lines()
    lines.show(VIEW)
    monkeypatch.setattr(os, "get_terminal_size", gone)
    if closes:
        streams.err.close()
    lines.close()
    assert not lines.open and "write" not in vars(streams.err)
    print("after", file=streams.out)
    assert streams.seen()[-1].endswith("after")


def test_the_lines_are_below_all_text_while_they_are_shown(streams: Streams) -> None:
    lines = streams.lines()
    lines.show(["a view that is higher", *VIEW])
    print("printed", file=streams.out)
    lines.show(VIEW)
    print("no end yet", end="", file=streams.out, flush=True)
    lines.show(VIEW)
    lines.forget()
    assert streams.seen() == ["printed", "no end yet", *VIEW]


def test_lines_of_many_threads_stay_whole(streams: Streams) -> None:
    lines = streams.lines()
    handlers = [PrefectConsoleHandler(streams.err), logging.StreamHandler(streams.out)]

    def texts(number: int) -> list[str]:
        return [f"thread {number} line {line} " + "x" * (17 * line % 90) for line in range(40)]

    def write(number: int) -> None:
        for text in texts(number):
            if number < 2:
                record = logging.makeLogRecord({"msg": text, "levelno": logging.INFO})
                handlers[number].emit(record)
            else:
                print(*text.split(" "), file=streams.out if number % 2 else streams.err)

    expected = [text for number in range(6) for text in texts(number)]
    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    height = 0
    while height < 6 or any(thread.is_alive() for thread in threads):
        height += 1
        lines.show([f"VIEW {height} {row}" for row in range(height % 7)])
    lines.close()
    whole = "\n".join(streams.seen())
    for text in expected:
        # The terminal wraps longer lines after 60 characters.
        pieces = [text[at : at + 60] for at in range(0, len(text), 60)]
        assert whole.count("\n".join(pieces)) >= 1, text
    assert whole.replace("\n", "").count("thread") == len(expected)
    assert "VIEW" not in whole


def test_a_line_that_is_too_long_is_cut(streams: Streams) -> None:
    lines = streams.lines()
    lines.show(["x" * 100, "界" * 60])
    print("printed", file=streams.out)
    lines.forget()
    seen = streams.seen()
    assert seen[:2] == ["printed", "x" * 58 + "…"]
    assert seen[2].startswith("界界") and seen[2].endswith("…") and len(seen) == 3


def test_more_lines_without_an_end_than_the_terminal_has_rows_leave_nothing_behind(
    streams: Streams,
) -> None:
    lines = streams.lines()
    end = threading.Event()

    def write(number: int, written: threading.Event) -> None:
        streams.out.write(f"part {number} ")
        written.set()
        end.wait(60)

    threads = []
    for number in range(30):
        written = threading.Event()
        threads.append(threading.Thread(target=write, args=(number, written)))
        threads[-1].start()
        assert written.wait(60)
        lines.show([f"view {number}", "second"])
    end.set()
    for thread in threads:
        thread.join(60)
    lines.forget()
    streams.end()
    # The terminal has 20 rows. More lines could not be erased.
    erased = re.split(r"\r(?:\x1b\[\d+A)?\x1b\[J", streams.terminal.text)
    drawn = [text.split("\r\n") for text in erased]
    assert max(map(len, drawn)) == 19
    assert drawn[10] == [*(f"part {number} " for number in range(11)), "view 10", "second"]
    assert drawn[-1] == [f"part {number} " for number in range(11, 30)]


def test_a_terminal_without_a_size_is_not_drawn_on(streams: Streams) -> None:
    lines = streams.lines()
    lines.show(VIEW)
    print("> ", end="", file=streams.out)
    streams.terminal.resize(0, 0)
    lines.show(VIEW)
    assert not lines.open
    assert open_lower_lines(streams.out, streams.err) is None
    print("after", file=streams.out)
    assert streams.seen() == ["> after"]


DISPLAYS = {
    "a progress bar": "\r 10%|█         |",
    "a live display": "one\x1b[2K\x1b[1Atwo",
    "a hidden cursor": "\x1b[?25l",
    "a backspace": "12\x08\x08",
}


@pytest.mark.parametrize("text", DISPLAYS.values(), ids=DISPLAYS)
def test_the_display_of_another_program_ends_the_lines(streams: Streams, text: str) -> None:
    lines = streams.lines()
    lines.show(VIEW)
    written = streams.err.write(text)
    assert written == len(text) and not lines.open
    lines.show(VIEW)
    streams.err.write("more\n")
    assert "write" not in vars(streams.out) and "write" not in vars(streams.err)
    streams.end()
    assert streams.terminal.text.endswith(f"\x1b[J{text}more\r\n")


def test_a_live_display_of_rich_finds_no_other_and_ends_the_lines(streams: Streams) -> None:
    lines = streams.lines()
    lines.show(VIEW)
    console = rich.console.Console(file=streams.err, force_terminal=True)
    with Live("theirs", console=console, auto_refresh=False) as live:
        live.refresh()
    assert not lines.open
    streams.end()
    assert "theirs" in streams.terminal.text


def test_what_is_no_text_is_refused_as_without_the_lines(streams: Streams) -> None:
    lines = streams.lines()
    with pytest.raises(TypeError, match="must be str"):
        streams.out.write(b"bytes")  # type: ignore[arg-type]
    lines.close()
    assert streams.seen() == []


def test_there_are_no_lines_where_nothing_may_be_drawn(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = streams.out, streams.err
    assert open_lower_lines(out, io.StringIO()) is None
    with open(os.devnull, "w") as file:
        assert open_lower_lines(out, file) is None
    assert open_lower_lines(out, None) is None
    # A display of another program has replaced the stream.
    assert open_lower_lines(rich.file_proxy.FileProxy(rich.console.Console(), out), err) is None
    with monkeypatch.context() as patch:
        patch.setenv("TERM", "dumb")
        assert open_lower_lines(out, err) is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "tcgetpgrp", lambda descriptor: os.getpgrp() + 1)
        assert open_lower_lines(out, err) is None
    with Live(console=rich.get_console()):
        assert open_lower_lines(out, err) is None
    first = streams.lines()
    assert open_lower_lines(out, err) is None
    first.close()
    second = streams.lines()
    second.close()
    assert streams.seen() == []


def test_prints_that_go_to_a_file_stay_there(
    streams: Streams, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "out.txt").open("w") as file:
        lines = open_lower_lines(file, streams.err)
        assert lines is not None
        lines.show(VIEW)
        print("printed", file=file)
        lines.close()
    assert (tmp_path / "out.txt").read_text() == "printed\n"
    assert streams.seen() == []


def drawn_soon(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect_gpu.live.view.FIRST_S", 0.01)
    monkeypatch.setattr("prefect_gpu.live.view.REFRESH_S", 0.01)
    monkeypatch.setattr("sys.stdout", streams.out)
    monkeypatch.setattr("sys.stderr", streams.err)


def test_a_view_is_of_all_flows_of_the_process_and_ends_with_the_last(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_soon(streams, monkeypatch)
    both = threading.Event()

    def second() -> FlowProgress:
        if "3 of 5 ended" in streams.terminal.text:
            both.set()
        return FlowProgress(RunCounts(2, 0, 0, {"Completed": 1}))

    view = LiveView()
    view.join("first", lambda: FlowProgress(RunCounts(3, 0, 0, {"Completed": 2})))
    view.join("second", second)
    assert both.wait(60)
    view.leave("first")
    assert "write" in vars(streams.out)
    view.leave("second")
    view.leave("second")
    assert "write" not in vars(streams.out)
    monkeypatch.undo()
    assert streams.seen() == []


def test_a_view_that_fails_ends_and_nothing_else_does(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_soon(streams, monkeypatch)
    called = threading.Event()

    def broken() -> FlowProgress:
        called.set()
        raise RuntimeError("no such flow")

    view = LiveView()
    view.join("flow", broken)
    assert called.wait(60)
    for thread in threading.enumerate():
        if thread.name == "prefect-gpu-live-view":
            thread.join(60)
    assert "write" not in vars(streams.out)
    print("printed", file=streams.out)
    view.leave("flow")
    monkeypatch.undo()
    assert streams.seen() == ["printed"]

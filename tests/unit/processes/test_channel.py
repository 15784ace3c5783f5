"""The child's end of the channel, over a socket pair."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from prefect_gpu.errors import ProtocolError
from prefect_gpu.processes import channel as channels
from prefect_gpu.processes import messages, values
from prefect_gpu.processes.channel import Channel, current_channel, set_current_channel
from prefect_gpu.processes.messages import Answered, Asked, BodyEnded, BodyStarted, FrameReader
from prefect_gpu.processes.transport import Parcel, unpack


class Pair:
    def __init__(self) -> None:
        self.parent, child = socket.socketpair()
        self.channel = Channel(child.detach())
        self.reader = FrameReader()

    def heard(self) -> list[tuple[int, bytes]]:
        data = self.parent.recv(1 << 20)
        return [(kind, bytes(body)) for kind, body in self.reader.feed(data)]

    def close(self) -> None:
        self.parent.close()
        self.channel._socket.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_a_message_and_its_value_arrive_together(pair: Pair) -> None:
    pair.channel.send(BodyStarted())
    pair.channel.send_with_value(BodyEnded(raised=False), Parcel(messages.VALUE, b"value"))
    (_, started), (_, ended), value = pair.heard()
    assert messages.decode(started) == BodyStarted()
    assert messages.decode(ended) == BodyEnded(raised=False)
    assert value == (messages.VALUE, b"value")


def test_a_value_whose_files_may_not_pass_goes_through_the_frame(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> int:
        raise ProtocolError("as many are on their way as may be")

    parcel = values.dumps(["x", bytes(2 << 20)], "return value", "result")
    assert parcel.files
    monkeypatch.setattr(channels.passing, "send", refuse)
    thread = threading.Thread(
        target=pair.channel.send_with_value, args=(BodyEnded(raised=False), parcel)
    )
    thread.start()
    heard: list[tuple[int, bytes]] = []
    while len(heard) < 2:
        heard += pair.heard()
    thread.join()
    kind, body = heard[1]
    contents = unpack(kind, bytearray(body), ())
    assert values.loads(contents, "return value") == ["x", bytes(2 << 20)]


def test_what_was_sent_is_received(pair: Pair) -> None:
    pair.parent.sendall(messages.encode(BodyStarted()) + messages.value_header(0))
    assert messages.decode(pair.channel.receive()) == BodyStarted()
    assert pair.channel.receive() == b""


def test_a_large_body_is_received_whole(pair: Pair) -> None:
    body = os.urandom(messages.MAPPED_BYTES + 1)
    thread = threading.Thread(
        target=pair.parent.sendall, args=(messages.value_header(len(body)) + body,)
    )
    thread.start()
    assert bytes(memoryview(pair.channel.receive())) == body
    thread.join()


def test_a_question_is_answered(pair: Pair) -> None:
    pair.parent.sendall(messages.encode(Answered(result=3)))
    assert pair.channel.ask("sum", a=1) == 3
    ((_, body),) = pair.heard()
    assert messages.decode(body) == Asked("sum", {"a": 1})


def test_an_answer_may_be_an_error_and_must_be_an_answer(pair: Pair) -> None:
    pair.parent.sendall(messages.encode(Answered(error=KeyError("no"))))
    with pytest.raises(KeyError, match="no"):
        pair.channel.ask("sum")
    pair.parent.sendall(messages.encode(BodyStarted()))
    with pytest.raises(ProtocolError, match="answered 'sum' with BodyStarted"):
        pair.channel.ask("sum")


def test_a_parent_that_is_gone_is_told_by_the_error(pair: Pair) -> None:
    pair.parent.close()
    with pytest.raises(EOFError):
        pair.channel.receive()
    with pytest.raises(BrokenPipeError):
        pair.channel.send(BodyStarted())


def test_a_channel_that_the_body_closed_is_an_error(pair: Pair) -> None:
    os.close(pair.channel._socket.detach())
    with pytest.raises(OSError, match="descriptor"):
        pair.channel.send(BodyStarted())


def test_in_a_fork_it_is_silent(pair: Pair) -> None:
    channels._forget(channels.weakref.ref(pair.channel))
    pair.channel.send(BodyStarted())
    pair.channel.send_with_value(BodyEnded(raised=False), Parcel(messages.VALUE, b""))
    with pytest.raises(RuntimeError, match="forked"):
        pair.channel.ask("sum")
    assert pair.parent.recv(10) == b"", "closed, and nothing was said"


def test_a_fork_leaves_alone_what_took_its_number(pair: Pair) -> None:
    number = pair.channel._socket.fileno()
    file = os.open(os.devnull, os.O_RDONLY)
    os.dup2(file, number)
    channels._forget(channels.weakref.ref(pair.channel))
    os.fstat(number)
    os.close(number)
    os.close(file)


def test_the_current_channel(pair: Pair) -> None:
    assert current_channel() is None
    set_current_channel(pair.channel)
    assert current_channel() is pair.channel
    set_current_channel(None)

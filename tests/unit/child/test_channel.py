"""The child's end of the channel, over a socket pair."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from prefect_gpu import values
from prefect_gpu.child import channel as channels
from prefect_gpu.child.channel import Channel
from prefect_gpu.clock import DEADLOCK_S
from prefect_gpu.errors import ProtocolError
from prefect_gpu.processes import messages
from prefect_gpu.processes.messages import Answered, Asked, BodyEnded, BodyStarted, ReleaseUnused
from prefect_gpu.values import transport
from prefect_gpu.values.transport import Frame, FrameReader, PackedValue
from tests.fakes.frames import feed


class Pair:
    def __init__(self) -> None:
        self.parent, child = socket.socketpair()
        self.descriptor = child.detach()
        self.channel = Channel(self.descriptor)
        self.channel._numbers = itertools.count()
        self.reader = FrameReader()

    def heard(self) -> list[tuple[int, bytes]]:
        data = self.parent.recv(1 << 20)
        return [(kind, bytes(body)) for kind, body, _ in feed(self.reader, data)]

    def close(self) -> None:
        self.parent.close()
        self.channel.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_a_message_and_its_value_arrive_together(pair: Pair) -> None:
    pair.channel.send(BodyStarted())
    pair.channel.send_with_value(BodyEnded(raised=False), PackedValue(bytearray(b"value")))
    (_, started), (_, ended), value = pair.heard()
    assert messages.decode(started) == BodyStarted()
    assert messages.decode(ended) == BodyEnded(raised=False)
    assert value == (transport.VALUE, b"value")


def test_a_value_whose_files_may_not_pass_goes_through_the_frame(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise ProtocolError("as many are on their way as may be")

    parcel = values.dumps(["x", bytes(2 << 20)], "return value", "result")
    assert parcel.files
    monkeypatch.setattr(channels.transport, "send", refuse)
    thread = threading.Thread(
        target=pair.channel.send_with_value, args=(BodyEnded(raised=False), parcel)
    )
    thread.start()
    heard: list[tuple[int, bytes]] = []
    while len(heard) < 2:
        heard += pair.heard()
    thread.join()
    kind, body = heard[1]
    contents = transport.unpack(Frame(kind, bytearray(body)))
    assert values.loads(contents, "return value") == ["x", bytes(2 << 20)]


def test_a_signal_handler_in_the_middle_of_a_message_sends_after_it(pair: Pair) -> None:
    large = Asked("large", {"value": bytes(8 << 20)})
    handled, refused = threading.Event(), list[str]()

    def send(*_: object) -> None:
        pair.channel.send(BodyStarted())
        # Its answer could not come before the rest of the message has gone.
        with pytest.raises(RuntimeError) as error:
            pair.channel.ask("allocate")
        refused.append(str(error.value))
        handled.set()

    heard: list[tuple[int, bytes]] = []

    def read() -> None:
        pair.parent.recv(1, socket.MSG_PEEK)
        # The message has begun, and the stream is full until the handler has returned.
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGALRM)
        assert handled.wait(DEADLOCK_S)
        while len(heard) < 2:
            heard.extend(pair.heard())

    reader = threading.Thread(target=read)
    before = signal.signal(signal.SIGALRM, send)
    try:
        reader.start()
        pair.channel.send(large)
        reader.join()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [messages.decode(body) for _, body in heard] == [large, BodyStarted()]
    assert "allocate was called by a finalizer or signal handler" in refused[0]


def test_a_finalizer_before_and_after_a_message_sends_too(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = pair.channel._check
    finalizers = [lambda: pair.channel.send(Asked("second", {}))]

    def check_with_finalizer() -> None:
        check()
        if finalizers:
            finalizers.pop()()

    monkeypatch.setattr(pair.channel, "_check", check_with_finalizer)
    pair.channel.send(Asked("first", {}))
    methods = [messages.decode(body).method for _, body in pair.heard()]  # type: ignore[attr-defined]
    assert methods == ["first", "second"]


def test_messages_of_a_closed_channel_are_not_kept(pair: Pair) -> None:
    os.close(pair.descriptor)
    for _ in range(2):
        with pytest.raises(OSError, match="Bad file descriptor"):
            pair.channel.send(BodyStarted())
    assert not pair.channel._late


def test_a_message_whose_sender_was_interrupted_is_not_sent_later(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pair.channel, "_check", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pair.channel.send(Asked("first", {}))
    monkeypatch.undo()
    pair.channel.send(BodyStarted())
    assert [messages.decode(body) for _, body in pair.heard()] == [BodyStarted()]


def test_a_question_while_a_request_is_received_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, refused = pair.channel.receive, list[str]()

    def receive_and_collect() -> messages.Message:
        with pytest.raises(RuntimeError) as error:
            pair.channel.ask("free")
        refused.append(str(error.value))
        return receive()

    monkeypatch.setattr(pair.channel, "receive", receive_and_collect)
    pair.parent.sendall(messages.encode(ReleaseUnused(5.0)))
    assert pair.channel.take_request() == ReleaseUnused(5.0)
    assert refused


def test_a_question_inside_a_question_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.channel, "send", lambda message: pair.channel.ask("free"))
    with pytest.raises(RuntimeError, match="free was called by a finalizer"):
        pair.channel.ask("allocate")
    monkeypatch.undo()
    pair.parent.sendall(messages.encode(Answered(3, number=1)))
    assert pair.channel.ask("allocate") == 3


def packed(data: bytes) -> PackedValue:
    return transport.pack([memoryview(data)], (), None)


def test_messages_and_values_from_the_parent_are_received(pair: Pair) -> None:
    pair.parent.sendall(messages.encode(BodyStarted()) + b"".join(packed(b"call").frame))
    assert pair.channel.receive() == BodyStarted()
    assert pair.channel.receive_value().stream == b"call"


def test_a_large_body_is_received_whole(pair: Pair) -> None:
    body = os.urandom(transport.MAPPED_BYTES + 1)
    thread = threading.Thread(target=pair.parent.sendall, args=(b"".join(packed(body).frame),))
    thread.start()
    assert bytes(memoryview(pair.channel.receive_value().stream)) == body
    thread.join()


def test_a_question_is_answered(pair: Pair) -> None:
    pair.parent.sendall(messages.encode(Answered(result=3)))
    assert pair.channel.ask("sum", a=1) == 3
    ((_, body),) = pair.heard()
    assert messages.decode(body) == Asked("sum", {"a": 1})


def test_an_answer_to_another_question_is_no_answer(pair: Pair) -> None:
    pair.parent.sendall(messages.encode(Answered(3, number=7)) + messages.encode(Answered(4)))
    assert pair.channel.ask("sum") == 4


def test_an_error_in_the_answer_is_raised(pair: Pair) -> None:
    pair.parent.sendall(messages.encode(Answered(error=KeyError("no"))))
    with pytest.raises(KeyError, match="no"):
        pair.channel.ask("sum")


def test_another_message_in_place_of_the_answer_is_an_error(pair: Pair) -> None:
    pair.parent.sendall(messages.encode(BodyStarted()))
    with pytest.raises(ProtocolError, match="answered 'sum' with BodyStarted"):
        pair.channel.ask("sum")


def test_a_request_is_taken_once_and_without_waiting(pair: Pair) -> None:
    assert pair.channel.take_request() is None
    pair.parent.sendall(messages.encode(ReleaseUnused(5.0)))
    assert pair.channel.take_request() == ReleaseUnused(5.0)
    assert pair.channel.take_request() is None


def test_a_request_that_comes_before_an_answer_is_kept(pair: Pair) -> None:
    pair.parent.sendall(messages.encode(ReleaseUnused(5.0)) + messages.encode(Answered(result=3)))
    assert pair.channel.ask("sum") == 3
    assert pair.channel.take_request() == ReleaseUnused(5.0)


def test_an_answer_that_is_waited_for_is_not_taken_for_a_request(pair: Pair) -> None:
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(pair.channel.ask("sum")))
    thread.start()
    pair.heard()
    pair.parent.sendall(messages.encode(Answered(result=3)))
    pair.channel.take_request()
    thread.join()
    assert answers == [3]


def test_an_answer_that_nothing_waits_for_is_no_request(pair: Pair) -> None:
    pair.parent.sendall(messages.encode(Answered(result=3)))
    assert pair.channel.take_request() is None
    pair.parent.sendall(messages.encode(Answered(result=4)))
    assert pair.channel.ask("sum") == 4


def test_a_parent_that_is_gone_requests_nothing(pair: Pair) -> None:
    pair.parent.sendall(messages.encode(ReleaseUnused(5.0))[:-1])
    pair.parent.shutdown(socket.SHUT_WR)
    assert pair.channel.take_request() is None
    pair.parent.close()
    assert pair.channel.take_request() is None


def test_a_parent_that_is_gone_is_the_end_of_the_stream_and_a_broken_pipe(pair: Pair) -> None:
    pair.parent.close()
    with pytest.raises(EOFError):
        pair.channel.receive()
    with pytest.raises(BrokenPipeError):
        pair.channel.send(BodyStarted())


def test_a_channel_that_the_body_closed_is_an_error(pair: Pair) -> None:
    os.close(pair.descriptor)
    with pytest.raises(OSError, match="descriptor"):
        pair.channel.send(BodyStarted())
    with pytest.raises(OSError, match="descriptor"):
        pair.channel.take_request()


def test_a_fork_of_the_child_sends_nothing(pair: Pair) -> None:
    pair.channel.forget()
    pair.channel.send(BodyStarted())
    pair.channel.send_with_value(BodyEnded(raised=False), PackedValue(bytearray()))
    with pytest.raises(RuntimeError, match="forked"):
        pair.channel.ask("sum")
    assert pair.parent.recv(10) == b"", "closed, and nothing was said"


def test_a_fork_leaves_a_file_alone_that_has_the_channels_descriptor(pair: Pair) -> None:
    number = pair.descriptor
    file = os.open(os.devnull, os.O_RDONLY)
    os.dup2(file, number)
    pair.channel.forget()
    os.fstat(number)
    os.close(number)
    os.close(file)

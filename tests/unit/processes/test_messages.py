"""Messages arrive as they were, and what is no message is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from prefect_gpu.errors import ProtocolError
from prefect_gpu.frameworks.adapter import Counters
from prefect_gpu.processes import messages, transport
from prefect_gpu.processes.messages import Asked, BodyStarted, CountersRead
from prefect_gpu.processes.transport import FrameReader
from tests.fakes.frames import feed


@pytest.mark.parametrize(
    "message",
    [
        BodyStarted(),
        Asked("sum", {"a": 1}),
        CountersRead(Counters(1, 2, 3, 4, 5, freed_bytes=6), ("torch",)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_with_every_field(message: Any) -> None:
    ((kind, body, _),) = feed(FrameReader(), messages.encode(message))
    assert kind == transport.MESSAGE
    assert messages.decode(body) == message


@pytest.mark.parametrize("body", [b"", b"abc", pickle.dumps({"no": "message"})])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        messages.decode(body)

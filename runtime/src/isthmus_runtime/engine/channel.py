"""What an API process and its engine process tell each other. Pure: bytes in, messages out.

A frame is its length (4 bytes, little-endian) and a msgpack list of messages: one frame a turn and direction, with the
tokens of all rows of a step, or all requests that one turn of the event loop has read. msgspec checks every type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from ..errors import EngineFailed, IsthmusError, RequestError, error_from_json
from ..protocol.calls import CommitCall, PrefillAnswer
from ..protocol.lines import parse_prefill_answer
from ..protocol.ticket import Ticket
from ..request import AdapterName, FinishReason, GenerateRequest, TokenChunk
from .exchange import Reply
from .long_reply import LongReply, has_many_scores, long_reply
from .seam import EngineFacts, EngineStatus

MAX_FRAME_BYTES = 256 << 20
"""Four times the largest body that a port takes."""
UNFIT = f"it has more than {MAX_FRAME_BYTES >> 20} MiB, a number beyond 64 bits or half a character"
"""What `pack` has no frame for."""
_HEAD = 4
_T = TypeVar("_T")


class ChannelError(IsthmusError):
    """The other process sent what is no frame, or no message."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Generate(_Message, frozen=True):
    """`Engine.generate`."""

    request: GenerateRequest
    attempt: str
    local_attempt: str
    peer_url: str
    peer_epoch: str


class Prefill(_Message, frozen=True):
    """`Engine.prefill`."""

    request: GenerateRequest
    attempt: str
    ticket: Ticket | None


class GiveTicket(_Message, frozen=True):
    """`Engine.ticket`."""

    ticket: Ticket


class Commit(_Message, frozen=True):
    """`Engine.commit`."""

    call: CommitCall


class Abort(_Message, frozen=True):
    """`Engine.abort`. Without an answer, `Gone` follows whatever was said before."""

    request_id: str
    attempt: str
    reason: str
    answer: bool


class AskDrained(_Message, frozen=True):
    """`Engine.is_drained`; `Drained` answers."""

    number: int
    attempt: str


class ChangeAdapter(_Message, frozen=True):
    """`Engine.change_adapter`; `AdapterChanged` answers."""

    number: int
    name: str
    path: str | None
    replace: bool


class Trim(_Message, frozen=True):
    """`Engine.trim`."""


class Stop(_Message, frozen=True):
    """End all requests and transfers; `Stopped` answers, then the process ends."""


ToEngine = Generate | Prefill | GiveTicket | Commit | Abort | AskDrained | ChangeAdapter | Trim | Stop


class Ready(_Message, frozen=True):
    """The engine serves from now on."""

    facts: EngineFacts
    status: EngineStatus


class Replies(_Message, frozen=True):
    """What a step, or a command, gave to requests, by scheduler id."""

    chunks: list[tuple[str, TokenChunk]]
    tickets: list[tuple[str, Ticket]] = []
    """Of requests that are in no `chunks` but for their end."""
    answers: list[tuple[str, PrefillAnswer]] = []
    long: list[tuple[str, LongReply]] = []
    """Those with many scores, which come before any token of their request."""


class Gone(_Message, frozen=True):
    """No more replies to the request of this id that was aborted; later ones are to another."""

    sid: str


class Started(_Message, frozen=True):
    """Rows that are in a step for the first time. Only told where there are traces."""

    sids: list[str]
    at: float
    """Monotonic seconds: the same clock in all processes of a host."""


class KvChanges(_Message, frozen=True):
    """Changes of the prefix cache, in order."""

    changes: list[tuple[bool, int, bytes, int]]
    """(whether it was stored, else removed; seq; hash; group)"""


class Status(_Message, frozen=True):
    """A few times a second, also when nothing happens: silence is a fault."""

    status: EngineStatus


class Drained(_Message, frozen=True):
    """The answer to `AskDrained`."""

    number: int
    drained: bool


class AdapterChanged(_Message, frozen=True):
    """The answer to `ChangeAdapter`."""

    number: int
    error: RequestError | None
    adapters: tuple[AdapterName, ...]
    """All that there are now."""


class Stopped(_Message, frozen=True):
    """Nothing of this engine moves any more."""


FromEngine = Ready | Replies | Gone | Started | KvChanges | Status | Drained | AdapterChanged | Stopped


def _encode(value: object) -> object:
    if isinstance(value, RequestError):
        # What a message quotes may hold half a character, for which there would be no frame.
        told = value.to_json().items()
        return value.status, {k: v.encode(errors="backslashreplace").decode() if type(v) is str else v for k, v in told}
    if isinstance(value, BaseModel):
        return value.model_dump_json().encode()
    raise NotImplementedError(f"{type(value).__name__} does not travel between processes")


def _decode(kind: type[object], value: Any) -> object:
    if issubclass(kind, RequestError):
        status, body = value
        return error_from_json(status, body)
    if kind is PrefillAnswer:
        return parse_prefill_answer(value)
    assert issubclass(kind, BaseModel), kind
    return kind.model_validate_json(value)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode)
_TO_ENGINE = msgspec.msgpack.Decoder(list[ToEngine], dec_hook=_decode)
_FROM_ENGINE = msgspec.msgpack.Decoder(list[FromEngine], dec_hook=_decode)


def pack(messages: Sequence[ToEngine | FromEngine], limit: int = MAX_FRAME_BYTES) -> bytes | None:
    """One frame; None where it would have more than `limit` bytes, or something in it has no place in msgpack: a number
    beyond 64 bits, half a character."""
    frame = bytearray(_HEAD)
    try:
        _ENCODER.encode_into(messages, frame, _HEAD)
    except (OverflowError, UnicodeEncodeError):
        return None
    if len(frame) - _HEAD > limit:
        return None
    frame[:_HEAD] = (len(frame) - _HEAD).to_bytes(_HEAD, "little")
    return bytes(frame)


def replies(found: Sequence[tuple[str, Reply]]) -> Replies:
    """The replies of one or more turns. Those of one request keep their order: a ticket comes before its tokens."""
    told = Replies([], [], [], [])
    for sid, reply in found:
        if isinstance(reply, Ticket):
            told.tickets.append((sid, reply))
        elif has_many_scores(reply.prompt_logprobs):
            told.long.append((sid, long_reply(reply)))
        elif isinstance(reply, TokenChunk):
            told.chunks.append((sid, reply))
        else:
            told.answers.append((sid, reply))
    return told


def reply_frames(found: Sequence[tuple[str, Reply]], limit: int = MAX_FRAME_BYTES) -> Iterator[bytes]:
    """Frames that hold these replies: one, unless `pack` has none for all of them. A reply that it has none for becomes
    the end of its request."""
    frame = pack([replies(found)], limit)
    if frame is not None:
        yield frame
    elif len(found) > 1:
        middle = len(found) // 2
        yield from reply_frames(found[:middle], limit)
        yield from reply_frames(found[middle:], limit)
    else:
        sid = found[0][0]
        error = EngineFailed(f"a reply cannot leave the engine process: {UNFIT}; ask for less at once")
        chunk = TokenChunk(finish_reason=FinishReason.ERROR, error=error.located("generation", sid))
        frame = pack([replies([(sid, chunk)])])
        assert frame is not None
        yield frame


class Frames:
    """Bytes as they come to bodies of frames."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are whole now. Raises ChannelError for one that is announced larger than the limit."""
        held = self._held
        held += data
        found, at = [], 0
        while len(held) - at >= _HEAD:
            size = int.from_bytes(held[at : at + _HEAD], "little")
            if size > self._limit:
                raise ChannelError(f"a frame of {size} bytes is announced, {self._limit} are allowed")
            if len(held) - at - _HEAD < size:
                break
            found.append(bytes(held[at + _HEAD : at + _HEAD + size]))
            at += _HEAD + size
        del held[:at]
        return found


def to_engine(body: bytes) -> list[ToEngine]:
    """The messages of a frame to an engine. Raises ChannelError."""
    return _read(_TO_ENGINE, body)


def from_engine(body: bytes) -> list[FromEngine]:
    """The messages of a frame from an engine. Raises ChannelError."""
    return _read(_FROM_ENGINE, body)


def _read(decoder: msgspec.msgpack.Decoder[list[_T]], body: bytes) -> list[_T]:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, TypeError) as e:
        raise ChannelError(f"a frame of {len(body)} bytes cannot be read: {e}") from e

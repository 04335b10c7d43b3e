"""Messages between an API process and its engine process: whatever is said arrives as it was, or not at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise

import msgspec
import pytest
from engine_world import request
from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.engine.channel import (
    Abort,
    AdapterChanged,
    AskDrained,
    ChangeAdapter,
    ChannelError,
    Commit,
    Drained,
    Frames,
    FromEngine,
    Generate,
    GiveTicket,
    Gone,
    KvChanges,
    Prefill,
    Ready,
    Replies,
    Started,
    Status,
    Stop,
    Stopped,
    ToEngine,
    Trim,
    from_engine,
    pack,
    replies,
    reply_frames,
    to_engine,
)
from isthmus_runtime.engine.exchange import Reply
from isthmus_runtime.engine.loop import Snapshot
from isthmus_runtime.engine.seam import AdapterList, AdapterProblem, EngineFacts, EngineStatus
from isthmus_runtime.engine.sequence import SchedulerStats
from isthmus_runtime.errors import Cancelled, EngineFailed, InvalidRequest, NeverFits, Overloaded, TransferFailed
from isthmus_runtime.interfaces.handoff import HandoffStats
from isthmus_runtime.kv.pool_records import PoolCounts
from isthmus_runtime.protocol.calls import CommitCall, PrefillAnswer
from isthmus_runtime.protocol.info import KvInfo, TransferInfo
from isthmus_runtime.protocol.ticket import ReservedBlocks, Ticket
from isthmus_runtime.request import (
    AdapterName,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Structure,
    TokenChunk,
    TokenLogprobs,
)

STATUS = EngineStatus(
    snapshot=Snapshot(
        SchedulerStats(*range(len(fields(SchedulerStats)))),
        PoolCounts(free=1, owned=2, writing=3, cached=4, quarantined=5, null=1),
    ),
    failure="no",
    stalled_s=0.5,
    transfer_failures={"sending": 3},
    moved=HandoffStats(*range(len(fields(HandoffStats)))),
    adapters=(AdapterName("sql", "d"),),
    adapter_list=AdapterList("0123", 2, (AdapterProblem("chat", "no such folder"),)),
)
TICKET = Ticket(
    mode="direct", attempt="a", layout_digest="d", blocks=(ReservedBlocks(group=0, first=1, block_ids=(3,)),)
)
TO_ENGINE: list[ToEngine] = [
    Generate(request("r", [1, 2], 3), "a", "", "http://1.2.3.4:5", "e"),
    Prefill(request("r", [2**31 - 1], 3), "a", TICKET),
    GiveTicket(TICKET),
    Commit(CommitCall(request_id="r", attempt="a", ok=False, stage="s", reason="ä")),
    Abort("r", "a", "why", answer=False),
    AskDrained(7, "a"),
    ChangeAdapter(8, "sql", None, True),
    Trim(),
    Stop(),
]
FROM_ENGINE: list[FromEngine] = [
    Ready(
        EngineFacts(
            kv=KvInfo(
                block_size=1, physical_blocks=2, usable_blocks=1, bytes_per_block=4, max_model_len=5, layout_digest="d"
            ),
            transfer=TransferInfo(mode="direct", epoch="e"),
            fingerprint="f",
            vocab_size=9,
            model_revision="m",
        ),
        STATUS,
    ),
    Replies([("a", TokenChunk((1, 2)))], [("b", TICKET)], [("c", PrefillAnswer(attempt="c", num_tokens=3))]),
    Gone("a"),
    Started(["a", "b"], 12.5),
    KvChanges([(True, 1, b"\x00\xff", 0), (False, 2, b"h", 1)]),
    Status(STATUS),
    Drained(7, True),
    AdapterChanged(8, None, (AdapterName("sql", "d"),)),
    Stopped(),
]


def bodies(data: bytes) -> list[bytes]:
    return Frames().feed(data)


def test_every_message_arrives_as_it_was() -> None:
    assert {type(m) for m in TO_ENGINE} == set(ToEngine.__args__), "one of each"
    assert {type(m) for m in FROM_ENGINE} == set(FromEngine.__args__), "one of each"
    for frame, read, messages in (
        (pack(TO_ENGINE), to_engine, TO_ENGINE),
        (pack(FROM_ENGINE), from_engine, FROM_ENGINE),
    ):
        assert frame is not None
        (body,) = bodies(frame)
        assert read(body) == messages


floats = st.floats(allow_nan=False, width=32) | st.just(-math.inf)
ids = st.integers(0, 2**31 - 1)
logprobs = st.builds(TokenLogprobs, ids, floats, st.tuples() | st.tuples(st.tuples(ids, floats)), st.integers(0, 5))
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31),
    temperature=st.floats(0, 2),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    logit_bias=st.lists(st.tuples(ids, floats), max_size=2).map(tuple),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=2).map(tuple), max_size=2).map(tuple),
)
requests = st.builds(
    GenerateRequest,
    request_id=st.text(min_size=1, max_size=8),
    prompt_token_ids=st.lists(ids, min_size=1, max_size=20).map(tuple),
    sampling=samplings,
    priority=st.integers(-(2**31), 2**31 - 1),
    timeout_s=st.floats(0.1, 1e6),
    cache_salt=st.text(max_size=3),
    prompt_group=st.just(""),
    structure=st.none() | st.just(Structure("regex", "a+")),
)
chunks = st.builds(
    TokenChunk,
    st.lists(ids, max_size=4).map(tuple),
    st.lists(logprobs, max_size=2).map(tuple),
    st.none() | st.sampled_from(FinishReason),
    error=st.none(),
    cached_tokens=ids,
    note=st.sampled_from(["", "local"]),
    prompt_logprobs=st.lists(logprobs, max_size=3).map(tuple),
    prompt_tokens=ids,
)


@given(st.lists(requests, max_size=4), st.lists(st.tuples(st.text(max_size=4), chunks), max_size=6), st.data())
def test_bytes_come_in_any_pieces(
    asked: list[GenerateRequest], said: list[tuple[str, TokenChunk]], data: st.DataObject
) -> None:
    first = pack([Generate(r, "", r.request_id, "", "") for r in asked])
    second = pack([Replies(said)])
    assert first is not None and second is not None
    stream = first + second
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    frames, found = Frames(), []
    for begin, end in pairwise([0, *cuts, len(stream)]):
        found += frames.feed(stream[begin:end])
    assert len(found) == 2
    assert [m.request for m in to_engine(found[0]) if isinstance(m, Generate)] == asked
    assert from_engine(found[1]) == [Replies(said)]


@pytest.mark.parametrize(
    "error",
    [
        NeverFits("too long", param="prompt"),
        Overloaded("full", status=429, retry_after_s=2.0),
        TransferFailed("gone", stage="sending", attempt="a"),
        EngineFailed("broken").located("generation", "a"),
        Cancelled("left"),
        InvalidRequest("lora_path: \ud800 is 1, and its meaning is not known here", param="\udfff"),
    ],
)
def test_errors_keep_what_they_are(error: EngineFailed) -> None:
    frame = pack([Replies([("a", TokenChunk(finish_reason=FinishReason.ERROR, error=error))])])
    assert frame is not None
    (message,) = from_engine(bodies(frame)[0])
    assert isinstance(message, Replies)
    found = message.chunks[0][1].error
    assert type(found) is type(error) and found.to_json() == error.to_json() and found.status == error.status


def test_scores_that_are_not_finite_arrive() -> None:
    answer = PrefillAnswer(attempt="a", num_tokens=3, prompt_logprobs=(TokenLogprobs(1, -math.inf, ((2, -0.5),), 7),))
    frame = pack([Replies([], [], [("a", answer)])])
    assert frame is not None
    assert from_engine(bodies(frame)[0]) == [Replies([], [], [("a", answer)])]


@given(st.binary(max_size=200))
def test_what_is_no_message_is_an_error_of_the_channel(body: bytes) -> None:
    for read in (to_engine, from_engine):
        try:
            found = read(body)
        except ChannelError:
            continue
        assert all(isinstance(m, msgspec.Struct) for m in found)


@given(st.sampled_from([pack(TO_ENGINE), pack(FROM_ENGINE)]), st.data())
def test_a_damaged_byte_never_brings_anything_but_messages_or_an_error(frame: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(4, len(frame) - 1))
    damaged = bytearray(frame[4:])
    damaged[at - 4] ^= data.draw(st.integers(1, 255))
    for read in (to_engine, from_engine):
        try:
            read(bytes(damaged))
        except ChannelError as error:
            assert "cannot be read" in str(error)


def test_a_frame_that_is_announced_too_large_is_refused_before_it_comes() -> None:
    with pytest.raises(ChannelError, match="101 bytes is announced, 100 are allowed"):
        Frames(limit=100).feed((101).to_bytes(4, "little"))
    assert Frames(limit=100).feed((100).to_bytes(4, "little") + bytes(99)) == []


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(150, 400))
def test_replies_are_split_where_a_frame_would_be_too_large(sizes: Sequence[int], limit: int) -> None:
    """In order, none lost; one that fits no frame becomes the end of its request, and none of another."""
    found: list[tuple[str, Reply]] = [(str(i), TokenChunk((2**30,) * size)) for i, size in enumerate(sizes)]
    seen: list[tuple[str, TokenChunk]] = []
    for frame in reply_frames(found, limit):
        (message,) = from_engine(bodies(frame)[0])
        assert isinstance(message, Replies)
        seen += message.chunks
    assert [sid for sid, _ in seen] == [sid for sid, _ in found]
    for (sid, got), (_, said) in zip(seen, found, strict=True):
        frame = pack([replies([(sid, said)])], limit)
        if frame is not None:
            assert got == said
        else:
            assert got.finish_reason is FinishReason.ERROR and got.error is not None
            assert "cannot leave the engine process" in got.error.message and got.error.attempt == sid


def test_half_a_character_in_an_error_stays_readable() -> None:
    """What an error quotes may come from any file; the process must not end for it."""
    frame = pack([AdapterChanged(1, InvalidRequest("key \ud800 is set"), ())])
    assert frame is not None
    (body,) = Frames().feed(frame)
    (changed,) = from_engine(body)
    assert isinstance(changed, AdapterChanged) and changed.error is not None
    assert changed.error.message == "key \\ud800 is set"


@pytest.mark.parametrize("top", [0, 3])
def test_many_scores_are_read_apart_from_their_frame(top: int) -> None:
    """A frame is read on the event loop, in one go: what is long in it stays bytes, in pieces."""
    alternatives = tuple((i, -0.5 * i) for i in range(top))
    scores = tuple(TokenLogprobs(i, -math.inf if i % 7 else -0.25, alternatives, i % 5) for i in range(9000))
    ticket_first = [("b", TICKET), ("b", TokenChunk((7,), prompt_logprobs=scores)), ("b", TokenChunk((8,)))]
    answer = PrefillAnswer(attempt="c", num_tokens=9001, prompt_logprobs=scores)
    few = TokenChunk((1,), prompt_logprobs=scores[:9])
    frame = pack([replies([*ticket_first, ("c", answer), ("a", few)])])
    assert frame is not None
    (message,) = from_engine(bodies(frame)[0])
    assert isinstance(message, Replies)
    assert message.tickets == [("b", TICKET)] and message.answers == []
    assert message.chunks == [("b", TokenChunk((8,))), ("a", few)]
    assert [(sid, reply.read()) for sid, reply in message.long] == [ticket_first[1], ("c", answer)]
    assert all(len(piece) < 100_000 for _, reply in message.long for piece in reply.pieces)

"""A reply with the scores of a long prompt, as it crosses the channel: read by its reader, a piece at a time.

msgspec lets no other thread run until it returns. A quarter of a million log-probabilities in one go would hold up
every stream of an API process for half a second, and the engine's own thread while they are packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..protocol.calls import PrefillAnswer
from ..request import TokenChunk, TokenLogprobs

_PIECE = 1 << 12
"""Log-probabilities in a piece: some milliseconds."""
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[TokenLogprobs])


class LongReply(msgspec.Struct, frozen=True, array_like=True):
    """Either `chunk` or `answer` is given, without its scores; these are in `pieces`."""

    chunk: TokenChunk | None
    answer: PrefillAnswer | None
    pieces: list[bytes]

    def read(self) -> TokenChunk | PrefillAnswer:
        """The reply. Takes long: for a thread. Raises msgspec.MsgspecError for bytes that are no scores."""
        scores: list[TokenLogprobs] = []
        for piece in self.pieces:
            scores += _DECODER.decode(piece)
        if self.chunk is not None:
            return self.chunk._replace(prompt_logprobs=tuple(scores))
        assert self.answer is not None
        return self.answer.model_copy(update={"prompt_logprobs": tuple(scores)})


def has_many_scores(scores: Sequence[TokenLogprobs]) -> bool:
    """Whether they are too many to be written or read while others wait."""
    return bool(scores) and len(scores) * _width(scores) > _PIECE


def long_reply(reply: TokenChunk | PrefillAnswer) -> LongReply:
    """`reply`, which `has_many_scores`, with these packed."""
    scores = reply.prompt_logprobs
    step = max(1, _PIECE // _width(scores))
    pieces = [_ENCODER.encode(scores[at : at + step]) for at in range(0, len(scores), step)]
    if isinstance(reply, TokenChunk):
        return LongReply(reply._replace(prompt_logprobs=()), None, pieces)
    return LongReply(None, reply.model_copy(update={"prompt_logprobs": ()}), pieces)


def _width(scores: Sequence[TokenLogprobs]) -> int:
    return 1 + len(scores[0].top)

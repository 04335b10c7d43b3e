"""What a result means: tokens become visible, blocks are published or handed over, requests end exactly once. Pure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ..errors import RequestError
from ..interfaces.steps import Chunk, StepOutput
from ..request import FinishReason, TokenChunk, TokenLogprobs
from .blocks import SequenceBlocks
from .drafts import MOST_FORCED, Speculation
from .handoffs import Handoffs
from .in_flight import StepsInFlight
from .queues import Queues
from .sequence import CancelAttempt, Effect, Emit, Kind, Phase, Sequence

MASKS_EARLY, MASKS_EARLY_MOST = 2, 32
"""A request that missed a draw waits with as many tokens for their masks before it is planned: with twice as many as
the last time if it misses another soon after, for its grammar is slow then. One that its machine held up is not."""
TICKET_S = 1.0
"""A prompt that was computed without a ticket keeps its blocks for so long. Decode had room when the router began it;
where it has none after all, blocks of both sides would wait for each other."""
_new = tuple.__new__


class Completion:
    """Takes the results of steps, and ends requests."""

    def __init__(
        self,
        queues: Queues,
        blocks: SequenceBlocks,
        handoffs: Handoffs,
        in_flight: StepsInFlight,
        speculation: Speculation,
        look_again: Callable[[float, str], None],
    ) -> None:
        """`look_again(when, sid)`: a request has a further deadline."""
        self._queues = queues
        self._blocks = blocks
        self._handoffs = handoffs
        self._in_flight = in_flight
        self._speculation = speculation
        self._look_again = look_again

    def complete(self, output: StepOutput, now: float) -> list[Effect]:
        """Take the result of the oldest step in flight."""
        step = output.step
        work = self._in_flight.complete(step)
        effects: list[Effect] = []
        for number, found in output.scores:
            work[number][0].scored(work[number][2].start, found)
        append = effects.append
        ended, sends = Phase.ENDED, Kind.SEND  # an attribute of an enum costs as much as the rest of a test
        for (seq, run, chunk), (tokens, logprobs) in zip(work, output.rows, strict=True):
            _, start, count, draws, drafts = chunk
            if step <= seq.void_step:
                continue
            seq.unseen -= draws
            if seq.phase is ended:
                continue
            if drafts:
                append(self._verified(seq, run, chunk, tokens, logprobs))
                continue
            if run == seq.run:
                seq.written = written = start + count
                if written >= seq.publish_at:
                    self._blocks.wrote(seq)
            if len(tokens) < draws:
                self._not_drawn(seq, run)
            if seq.kind is sends:
                if seq.early and tokens and seq.phase is Phase.RUNNING:
                    effects += self._first_told(seq, tokens, logprobs)
                if run == seq.run:
                    effects += self._handoffs.blocks_written(seq)
                if tokens:
                    effects += self._prompt_computed(seq, tokens[0], logprobs[0] if logprobs else None, now)
            elif tokens:
                known, token = seq.tokens, tokens[0]
                assert isinstance(known, list)  # of its own since it has a row
                known.append(token)
                if seq.prompt_len + 1 < len(known) < seq.end_len and token not in seq.stop_token_ids:
                    # In the middle of an answer. One per row and step: without the class's own `__new__` it costs half.
                    append((seq.sid, _new(TokenChunk, (tokens, logprobs, None, None, 0, "", (), b"", 0))))
                else:
                    append(self.emit(seq, tokens, logprobs))
                if seq.phase is not ended:
                    if seq.drafter is not None:
                        self._speculation.saw(seq)
                    elif seq.masks is not None:
                        was_forced = bool(seq.masks.forced().tokens)
                        self._ask_for_mask(seq, was_forced, not was_forced)
        for number, vector in output.pooled:
            seq = work[number][0]
            if seq.phase is not ended:  # whoever was preempted meanwhile has its vector all the same
                append(self._pooled(seq, vector))
        return effects

    def _pooled(self, seq: Sequence, vector: bytes) -> Emit:
        self.forget(seq)
        cached, note = seq.cached_tokens, seq.note
        return seq.sid, TokenChunk(finish_reason=FinishReason.STOP, cached_tokens=cached, note=note, vector=vector)

    def _verified(
        self, seq: Sequence, run: int, chunk: Chunk, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> Emit:
        """As many drafts as were right, and the token after them. Only their KV counts; the rest is written again."""
        ends = (at for at, token in enumerate(tokens, 1) if token in seq.stop_token_ids)
        kept = next(ends, len(tokens))
        seq.own().extend(tokens[:kept])
        self._speculation.verified(seq, len(chunk.drafts), len(tokens) - 1)
        if run == seq.run:
            seq.scheduled = seq.written = chunk.start + len(tokens)
            if seq.written >= seq.publish_at:
                self._blocks.wrote(seq)
        chunk_of_answer = self.emit(seq, tokens[:kept], logprobs[:kept])
        if seq.masks is not None and seq.phase is not Phase.ENDED:
            self._ask_for_mask(seq, len(tokens) - 1, 1)
        return chunk_of_answer

    def _not_drawn(self, seq: Sequence, run: int) -> None:
        """Its mask did not come in time: the last position is computed again, once the mask is known."""
        assert seq.masks is not None, f"{seq.sid} has no mask, and no token was drawn"
        seq.masks.drop()
        length = len(seq.tokens)
        soon = seq.masks_rest > 0 and length <= seq.masks_late_from + MASKS_EARLY_MOST
        seq.masks_rest = min(2 * seq.masks_rest, MASKS_EARLY_MOST) if soon else MASKS_EARLY
        seq.masks_late_from = length + seq.masks_rest
        seq.unseen, seq.void_step = 0, seq.last_step
        if run == seq.run:
            seq.scheduled = len(seq.tokens) - 1

    def _ask_for_mask(self, seq: Sequence, forced: int, others: int) -> None:
        """Have the next mask computed, for which a step may wait already. Of the newest tokens so many were forced."""
        assert seq.masks is not None
        self._speculation.saw_masked(seq, forced, others)
        with suppress(RequestError):  # it fails when the request is planned next
            seq.masks.allowed(seq.tokens[seq.prompt_len :], MOST_FORCED if seq.holds else 0)

    def _prompt_computed(self, seq: Sequence, token: int, logprob: TokenLogprobs | None, now: float) -> list[Effect]:
        if seq.phase is not Phase.RUNNING:
            return []  # preempted meanwhile: the blocks are gone, the prompt is computed again
        effects = self._handoffs.prompt_done(seq, token, logprob)
        seq.prompt_done_s = now
        if self._handoffs.awaits_ticket(seq.attempt):
            self._look_again(now + TICKET_S, seq.sid)
        self._queues.leave(seq)
        self._queues.enter(seq, Phase.SENDING)
        return effects

    def _first_told(self, seq: Sequence, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> list[Effect]:
        """The first token, before anything is done about its KV. One that is the last as well is decode's to tell."""
        if tokens[0] in seq.stop_token_ids or seq.request.sampling.max_tokens <= 1:
            return []
        return [(seq.sid, TokenChunk(tokens, logprobs, cached_tokens=seq.cached_tokens))]

    def emit(self, seq: Sequence, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> Emit:
        """Give out the request's newest tokens, the last of which may be its last."""
        length = len(seq.tokens)
        reason = None
        if tokens[-1] in seq.stop_token_ids:
            reason = FinishReason.STOP
        elif length >= seq.end_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.forget(seq)
        if length > seq.prompt_len + len(tokens):
            return seq.sid, TokenChunk(tokens, logprobs, reason)
        # The first tells of the prompt.
        return seq.sid, TokenChunk(tokens, logprobs, reason, None, seq.cached_tokens, seq.note, seq.take_scores())

    def end(self, seq: Sequence, reason: FinishReason, error: RequestError) -> list[Effect]:
        """End a request early, from any phase."""
        error = error.located(seq.phase.value, seq.attempt)
        effects: list[Effect] = []
        if seq.attempt and self._handoffs.awaits_ticket(seq.attempt):
            self._handoffs.released(seq.attempt, True)
        elif seq.attempt and self._handoffs.open(seq.attempt):
            effects.append(CancelAttempt(seq.attempt, error.message))
        if seq.phase is Phase.FETCHING:
            effects.append(CancelAttempt(seq.fetch, error.message))
        self._in_flight.ended_early(seq)
        self.forget(seq)
        effects.append((seq.sid, TokenChunk(finish_reason=reason, error=error)))
        return effects

    def forget(self, seq: Sequence) -> None:
        """The request is no longer live; a step in flight may still name it."""
        if seq.masks is not None:
            seq.masks.drop()
        self._queues.leave(seq)
        self._queues.enter(seq, Phase.ENDED)
        del self._queues.live[seq.sid]
        if seq.adapter:
            self._queues.adapters.ended(seq.adapter, self._in_flight.newest)

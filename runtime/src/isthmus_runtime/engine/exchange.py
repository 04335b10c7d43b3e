"""What comes of a turn of the engine: replies to callers, and what the scheduler and the transfer side tell each other.

On the engine thread alone. Effects wait until the turn applies them; if it breaks before, they are not lost.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence

from ..errors import EngineFailed, RequestError, TransferFailed
from ..interfaces.handoff import Drained, Failed, Fetched, HandoffEvent, KvHandoff, Received, Released, Sent
from ..protocol.calls import PrefillAnswer
from ..protocol.ticket import Ticket
from ..request import FinishReason, TokenChunk
from .scheduler import Scheduler
from .sequence import CancelAttempt, Effect, Emit, FinishSend, OpenFetch, OpenReceive, SendBlocks

log = logging.getLogger(__name__)

Reply = TokenChunk | Ticket | PrefillAnswer
LEAVE_S = 0.0003
"""So long a first token's blocks wait for it to leave."""
Sink = Callable[[Sequence[tuple[str, Reply]]], None]


class Exchange:
    """`handoff`: None where no KV moves; `sink`: of replies, must not block.

    effects: of the turn that runs, not yet applied; transfer_failures: by stage
    """

    def __init__(
        self,
        scheduler: Scheduler,
        handoff: KvHandoff | None,
        sink: Sink,
        left: Callable[[float], object] = lambda timeout_s: None,
    ) -> None:
        self._scheduler = scheduler
        self._handoff = handoff
        self._sink = sink
        self._left = left
        self.effects: deque[Effect] = deque()
        self._replies: list[tuple[str, Reply]] = []
        """Of effects that were applied, not yet given."""
        self.transfer_failures: Counter[str] = Counter()

    def apply(self, now: float) -> None:
        """Give the replies, and pass the rest on."""
        while self.effects:
            effect = self.effects.popleft()  # first: one that breaks is not tried again
            if isinstance(effect, tuple):  # an Emit
                self._replies.append(effect)
                continue
            if self._replies and isinstance(effect, SendBlocks):
                # The blocks of a long prompt take longer than all the rest, and the thread by which a first token
                # leaves needs the interpreter that they would keep: for 5 ms, by Python's rules.
                self._give()
                self._left(LEAVE_S)
            self._move(effect, now)
        self._give()

    def _give(self) -> None:
        if self._replies:
            replies, self._replies = self._replies, []
            self._sink(replies)

    def _move(self, effect: OpenReceive | OpenFetch | SendBlocks | FinishSend | CancelAttempt, now: float) -> None:
        """Pass on what concerns KV of others."""
        assert self._handoff is not None
        match effect:
            case OpenReceive(job):
                try:
                    self._replies.append((job.attempt, self._handoff.open_receive(job, now)))
                except RequestError as error:
                    ended = self._scheduler.refuse_receive(job.attempt, error)
                    self._replies += [e for e in ended if isinstance(e, tuple)]
            case OpenFetch(job):
                self._handoff.fetch(job, now)
            case SendBlocks(attempt, blocks):
                self._handoff.send_blocks(attempt, blocks, now)
            case FinishSend(attempt, result):
                self._handoff.finish_send(attempt, result, now)
            case CancelAttempt(attempt, reason):
                self._handoff.cancel(attempt, reason, now)

    def heard(self, event: HandoffEvent, now: float) -> list[Effect]:
        """What comes of an event of the transfer side."""
        match event:
            case Received(attempt=attempt, record=record):
                return self._scheduler.received(attempt, record)
            case Sent(attempt=attempt, sent_bytes=sent_bytes):
                seq = self._scheduler.sent(attempt)
                if seq is not None:
                    # Not checked again: the scores of a long prompt would hold the engine up.
                    answer = PrefillAnswer.model_construct(
                        attempt=attempt,
                        num_tokens=seq.prompt_len,
                        cached_tokens=seq.cached_tokens,
                        sent_bytes=sent_bytes,
                        transfer_s=max(0.0, now - seq.prompt_done_s),
                        prompt_logprobs=seq.take_scores(),
                    )
                    self._sink([(attempt, answer)])
            case Fetched(attempt=attempt, blocks=blocks, problem=problem, given_up=given_up):
                if problem and not given_up:
                    log.info("nothing was read from the storage pool (%s): %s", attempt, problem)
                self._scheduler.fetched(attempt, None if problem else blocks, now, fault=bool(problem) and not given_up)
            case Failed(attempt=attempt, stage=stage, reason=reason, given_up=given_up):
                if given_up and attempt not in self._scheduler.queues.live:
                    # The answer to a request that ended here: neither a failure nor late.
                    return []
                self.transfer_failures[stage] += not given_up
                log.info("KV of attempt %s did not move (%s): %s", attempt, stage, reason)
                error = TransferFailed(reason, stage=stage, attempt=attempt)
                return self._scheduler.transfer_failed(attempt, error, now)
            case Released(attempt=attempt, drained=drained):
                self._scheduler.released(attempt, drained)
            case Drained(attempt=attempt):
                self._scheduler.drained(attempt)
        return []

    def end(self, error: EngineFailed, now: float) -> None:
        """Tell everybody who waits, callers and peers, that the engine has failed."""
        # The answers first: what broke once may break again, and nobody is to wait for it.
        live = [refused(seq.sid, error.located(seq.phase.value, seq.attempt)) for seq in self._scheduler.live()]
        left, self.effects = self.effects, deque()
        replies, self._replies = self._replies, []
        self._sink([*replies, *(effect for effect in left if isinstance(effect, tuple)), *live])
        # Peers wait for the end of an attempt too, and hold blocks for it. What would begin now, does not.
        ends: list[Effect] = [effect for effect in left if isinstance(effect, CancelAttempt | FinishSend)]
        try:
            ends += [effect for effect in self._scheduler.abort_all(error) if not isinstance(effect, tuple)]
        except Exception:
            log.exception("the broken engine could not release what it held")
        for end in ends:
            assert not isinstance(end, tuple)
            try:
                self._move(end, now)
            except Exception:
                log.exception("the broken engine could not end a transfer: %s", end)
        self._replies.clear()


def refused(sid: str, error: RequestError) -> Emit:
    """The last chunk of a request that ends with an error."""
    return sid, TokenChunk(finish_reason=FinishReason.ERROR, error=error)

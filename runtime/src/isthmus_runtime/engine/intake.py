"""What may enter: a request that can never finish is refused at once, with the number it must stay under. Pure."""

from __future__ import annotations

from ..config import SchedulerConfig
from ..errors import InvalidRequest, NeverFits
from ..interfaces.steps import Masks
from ..request import GenerateRequest
from .blocks import SequenceBlocks
from .sequence import Kind, Sequence


class Intake:
    """Makes a `Sequence` of a request that this engine can finish."""

    def __init__(self, config: SchedulerConfig, max_model_len: int, blocks: SequenceBlocks) -> None:
        self._queue_timeout_s = config.queue_timeout_s
        self._max_model_len = max_model_len
        self._blocks = blocks
        self.never_fit = 0
        """Requests refused because they could never fit."""

    def admit(
        self,
        request: GenerateRequest,
        now: float,
        *,
        kind: Kind,
        attempt: str,
        peer_url: str,
        peer_epoch: str,
        skip_blocks: int,
        masks: Masks | None,
    ) -> Sequence:
        """The request as the scheduler knows it. Raises InvalidRequest or NeverFits."""
        self.check_fits(request, kind)
        end_len = self._end_len(request, kind)
        return Sequence(
            sid=attempt or request.request_id,
            request=request,
            kind=kind,
            arrival_s=now,
            deadline_s=now + request.timeout_s,
            queue_deadline_s=now + min(request.timeout_s, self._queue_timeout_s),
            end_len=end_len,
            peak=self._blocks.peak(end_len),
            tokens=request.prompt_token_ids,
            attempt=attempt,
            peer_url=peer_url,
            peer_epoch=peer_epoch,
            skip_blocks=skip_blocks,
            masks=masks,
        )

    def check_fits(self, request: GenerateRequest, kind: Kind) -> None:
        """Raise InvalidRequest or NeverFits for a request that would wait forever."""
        length = len(request.prompt_token_ids)
        if length == 0:
            raise InvalidRequest("prompt is empty; give at least one token", param="prompt")
        if request.sampling.max_tokens < 1:
            raise InvalidRequest(f"max_tokens {request.sampling.max_tokens} must be 1 or more", param="max_tokens")
        longest = self._max_model_len - 1
        if length > longest:
            self.never_fit += 1
            raise NeverFits(
                f"the prompt is too long: it has {length} tokens, and this service takes at most {longest} "
                f"(max_model_len {self._max_model_len} less one generated token); shorten the prompt",
                param="prompt",
            )
        total = self._end_len(request, kind)
        need, usable = self._blocks.peak(total), self._blocks.pool.usable
        if need > usable:
            self.never_fit += 1
            raise NeverFits(
                f"prompt plus output of {total} tokens needs {need} KV blocks, the pool has {usable} usable; "
                "shorten the prompt or lower max_tokens",
                param="max_tokens",
            )

    def _end_len(self, request: GenerateRequest, kind: Kind) -> int:
        # A prompt to be pooled ends one short of its end: with the vector, before anything is drawn.
        new_tokens = 1 if kind is Kind.SEND or request.pooling is not None else request.sampling.max_tokens
        return min(len(request.prompt_token_ids) + new_tokens, self._max_model_len)

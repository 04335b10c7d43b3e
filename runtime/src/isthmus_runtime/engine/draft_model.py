"""Drafts of a small model (Leviathan et al. 2023, arXiv:2211.17192), computed on a thread of its own.

The model takes its likeliest token each time, so a draft is certain of one token and is verified as one from the
request's own text is. It has an executor and a small KV pool of its own: some rows, each with blocks for the longest
request, which the requests that ask take from one another, the longest unused first. What a row has computed of a
request's tokens is kept: after drafts that were wrong it goes on from the last that was right.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from itertools import islice

from ..interfaces.steps import Chunk, Executor, RowStart, StepPlan
from ..kv.plan import KvPlan
from ..request import SamplingParams

log = logging.getLogger(__name__)

ROWS = 4
"""Requests that guess at a time. Where more run, a guess costs more than it saves."""
_LIKELIEST = SamplingParams(max_tokens=1, temperature=0.0)
_ANSWERS = 16 * ROWS
_NEWEST = 0.2
"""Weight of the newest measurement in what a draft takes."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Drafts that are wanted."""

    sid: str
    tokens: tuple[int, ...]
    """All of the request."""
    count: int


class DraftRows:
    """What the model's steps compute, and what its rows have. Pure."""

    def __init__(self, plan: KvPlan, rows: int, max_tokens: int) -> None:
        """`plan`: of a pool with blocks for so many rows of the longest length; `max_tokens`: of a step."""
        self.max_len = plan.max_model_len
        self.count = rows
        self._max_tokens = max_tokens
        self._blocks: list[tuple[tuple[int, ...], ...]] = []
        free = iter(range(1, plan.num_blocks))
        for _ in range(rows):
            self._blocks.append(tuple(tuple(islice(free, -(-self.max_len // g.block_size))) for g in plan.groups))
        self._computed: OrderedDict[str, tuple[int, tuple[int, ...]]] = OrderedDict()
        """By request, the longest unused first: its row, and the tokens whose KV is there."""
        self._free = list(range(rows))
        self._step = 0

    def plans(self, asks: Tokens[Ask]) -> list[StepPlan]:
        """Steps that draw for each of the asks, of which there are no more than rows, as often as it wants.

        Their draws of a row, in order, are its drafts.
        """
        starts, left = [], []
        for ask in asks:
            row, known = self._row(ask)
            starts.append(RowStart(row, ask.sid, ask.tokens, len(ask.tokens), self._blocks[row], _LIKELIEST))
            left.append((row, known, len(ask.tokens)))
        chunks: list[list[Chunk]] = []
        while left:
            budget, step, later = self._max_tokens, list[Chunk](), list[tuple[int, int, int]]()
            for row, start, end in left:
                count = min(budget, end - start)
                budget -= count
                if count:
                    step.append(Chunk(row, start, count, int(start + count == end)))
                if start + count < end:
                    later.append((row, start + count, end))
            chunks.append(step)
            left = later
        rows = [self._computed[ask.sid][0] for ask in asks]
        for nth in range(1, max((ask.count for ask in asks), default=0)):
            chunks.append(
                [
                    Chunk(row, len(ask.tokens) + nth - 1, 1, 1)
                    for row, ask in zip(rows, asks, strict=True)
                    if nth < ask.count
                ]
            )
        return [self._plan(tuple(starts) if not at else (), tuple(step)) for at, step in enumerate(chunks)]

    def drawn(self, ask: Ask, drafts: tuple[int, ...]) -> None:
        """The steps for the ask have ended: all tokens but the last draft have KV."""
        self._computed[ask.sid] = self._computed[ask.sid][0], ask.tokens + drafts[:-1]

    def _row(self, ask: Ask) -> tuple[int, int]:
        """A row for the ask, and how many of its tokens are computed there; the last one never is."""
        row, computed = self._computed.pop(ask.sid, (-1, ()))
        if row < 0:
            row = self._free.pop() if self._free else self._computed.popitem(last=False)[1][0]
        most = min(len(computed), len(ask.tokens) - 1)
        known = next((at for at in range(most) if computed[at] != ask.tokens[at]), most)
        self._computed[ask.sid] = row, ask.tokens[:known]
        return row, known

    def _plan(self, starts: tuple[RowStart, ...], chunks: tuple[Chunk, ...]) -> StepPlan:
        self._step += 1
        tokens = sum(chunk.num_tokens for chunk in chunks)
        return StepPlan(step=self._step, starts=starts, grown=(), chunks=chunks, num_tokens=tokens)


class DraftModel:
    """Answers asks, together those that are there. `start` and the methods after it are for the engine's thread."""

    def __init__(self, executor: Executor, rows: DraftRows, vocab_size: int) -> None:
        """`executor`: of the small model, which has `vocab_size` ids; closed by whoever made it, after `stop`."""
        self._executor = executor
        self._rows = rows
        self._vocab_size = vocab_size
        self._asks: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._asked = self._answered = 0
        self._answers: OrderedDict[str, tuple[int, tuple[int, ...]]] = OrderedDict()
        """By request: the length it was asked at, and the drafts."""
        self._wake: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="drafts", daemon=True)
        self.seconds = 0.0
        """What one draft of a request takes, of late."""
        self.works = True
        """Whether it answers; not any more once it has failed."""

    def start(self, wake: Callable[[], None]) -> None:
        """Start the thread. It calls `wake` when there are answers."""
        self._wake = wake
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread after what it computes."""
        self._asks.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def busy(self) -> bool:
        """Whether it has not answered everything."""
        return self._asked != self._answered

    @property
    def rows(self) -> int:
        """Where more requests guess than that, each takes the row of another, and computes all of its tokens again."""
        return self._rows.count

    def ask(self, sid: str, tokens: Tokens[int], count: int) -> bool:
        """Have at most `count` tokens guessed that follow `tokens`. False: there will be none."""
        count = min(count, self._rows.max_len - len(tokens))
        if count <= 0 or not self.works:
            return False
        self._asked += 1
        self._asks.put(Ask(sid, tuple(tokens), count))
        return True

    def answer(self, sid: str, length: int) -> tuple[int, ...]:
        """The guess for the request when it had `length` tokens; nothing where there is none (yet)."""
        asked_at, drafts = self._answers.get(sid, (0, ()))
        return drafts if asked_at == length else ()

    def _run(self) -> None:
        while (first := self._asks.get()) is not None:
            asks = [first]
            while len(asks) < ROWS and not self._asks.empty():
                if (ask := self._asks.get()) is None:
                    self._asks.put(None)  # the end, which the outer loop looks for
                    break
                asks.append(ask)
            newest = {ask.sid: ask for ask in asks}
            # A served model may have more ids than its tokenizer, and than this one.
            known = [ask for ask in newest.values() if max(ask.tokens) < self._vocab_size]
            if known and self.works:
                try:
                    self._compute(known)
                except Exception:
                    # Answers do not depend on guesses: the engine goes on without.
                    log.exception("the draft model failed; requests are computed without drafts from now on")
                    self.works = False
            self._answered += len(asks)
            self._wake()

    def _compute(self, asks: list[Ask]) -> None:
        began = time.monotonic()
        plans = self._rows.plans(asks)
        # Each step takes what the one before it drew from the device: all are queued at once.
        outputs = [future.result() for future in [self._executor.submit(plan) for plan in plans]]
        drafts: dict[int, list[int]] = {start.row: [] for start in plans[0].starts}
        for plan, output in zip(plans, outputs, strict=True):
            for chunk, drawn in zip(plan.chunks, output.rows, strict=True):
                drafts[chunk.row] += drawn.tokens
        for start, ask in zip(plans[0].starts, asks, strict=True):
            found = tuple(drafts[start.row])
            self._rows.drawn(ask, found)
            self._answers.pop(ask.sid, None)
            self._answers[ask.sid] = len(ask.tokens), found
            if len(self._answers) > _ANSWERS:
                self._answers.popitem(last=False)
        count = sum(len(found) for found in drafts.values())
        if plans[0].num_tokens <= 4 * len(asks):  # not a prompt's first computation
            self.seconds += (_NEWEST if self.seconds else 1.0) * ((time.monotonic() - began) / count - self.seconds)

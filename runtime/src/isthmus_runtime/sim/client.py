"""Clients: when they come, what they ask, what the right answer is, and when they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from ..errors import Cancelled, InvalidRequest, NeverFits
from ..executor.fake import Windows, expected_tokens
from ..request import FinishReason, GenerateRequest, SamplingParams, TokenChunk
from .clock import Clock, Violation
from .faults import Scenario
from .network import Exchange, Network

SLACK_S = 4.0
"""A terminal event may come this much after a request's timeout (the network may hold it up)."""


def draw_requests(scenario: Scenario) -> list[tuple[float, GenerateRequest]]:
    """Arrival times and requests. Prompts share prefixes; some can never fit; most are greedy."""
    r = Random(f"clients {scenario.seed}")
    requests: list[tuple[float, GenerateRequest]] = []
    for number in range(scenario.clients):
        length = r.randint(1, scenario.prompt_max)
        if r.random() < 0.03:
            length = scenario.max_model_len + r.randint(-1, 2)
        family = r.randint(0, 3)
        shared = r.randint(0, length)
        prompt = [family * 101 + i for i in range(shared)] + [r.randint(400, 900) for _ in range(length - shared)]
        greedy = r.random() < 0.8
        max_tokens = r.randint(1, scenario.output_max) if r.random() < 0.95 else 1000
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if greedy else 1.0,
            seed=r.randint(0, 99),
            stop_token_ids=(r.randint(0, 996),) if r.random() < 0.1 else (),
        )
        request = GenerateRequest(
            request_id=f"r{number}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            priority=r.choice((0, 0, -(2**31), 1)),
            cache_salt=r.choice(("", "", "", "tenant")),
            timeout_s=r.choice(scenario.timeouts_s),
        )
        requests.append((r.uniform(0, scenario.spread_s), request))
    return sorted(requests, key=lambda pair: pair[0])


class Client:
    """Sends one request and judges what comes back."""

    def __init__(
        self,
        clock: Clock,
        net: Network,
        request: GenerateRequest,
        limits: Sequence[int],
        on_over: Callable[[Client], None],
        leaves_after_s: float | None,
        windows: Windows = (None,),
    ) -> None:
        self.clock = clock
        self.request = request
        self.over = False
        self.outcome = ""
        self._net = net
        self._limits = limits
        """max_model_len of the engines that may answer."""
        self._on_over = on_over
        self._leaves_after_s = leaves_after_s
        count = min(request.sampling.max_tokens, max(limits) - len(request.prompt_token_ids))
        self.right = expected_tokens(request.prompt_token_ids, request.sampling, max(1, count), windows)
        self.got: list[int] = []
        self._exchange: Exchange | None = None

    def start(self) -> None:
        """Send."""
        self.clock.note("client", self.request.request_id, f"{len(self.request.prompt_token_ids)} tokens")
        self._exchange = self._net.call("router", self.request, self._item, self._ended, reliable=True)
        self.clock.after(self.request.timeout_s + SLACK_S, self._must_be_over)
        if self._leaves_after_s is not None:
            self.clock.after(self._leaves_after_s, self._leave)

    def _item(self, item: object) -> None:
        assert isinstance(item, TokenChunk)
        name = self.request.request_id
        if self.over:
            raise Violation(f"{name} got {item} after its end ({self.outcome})")
        self.got += item.token_ids
        if self.got != self.right[: len(self.got)]:
            at = next(i for i, (a, b) in enumerate(zip(self.got, [*self.right, -1], strict=False)) if a != b)
            raise Violation(f"{name} got a wrong token at output position {at}: {self.got} instead of {self.right}")
        if item.finish_reason is None:
            return
        self._check_finish(item)
        self._finish(item.finish_reason.value if item.error is None else type(item.error).__name__)

    def _check_finish(self, item: TokenChunk) -> None:
        name, sampling, length = self.request.request_id, self.request.sampling, len(self.request.prompt_token_ids)
        if (item.error is None) != (item.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)):
            raise Violation(f"{name} ended with {item.finish_reason} and error {item.error!r}")
        stops = [i for i, token in enumerate(self.got) if token in sampling.stop_token_ids]
        if item.finish_reason is FinishReason.STOP and stops != [len(self.got) - 1]:
            raise Violation(f"{name} stopped at {len(self.got)} tokens, stop tokens at {stops}")
        if item.finish_reason is FinishReason.LENGTH:
            allowed = {min(sampling.max_tokens, limit - length) for limit in self._limits}
            if len(self.got) not in allowed or stops:
                raise Violation(f"{name} ended by length at {len(self.got)} tokens, allowed {sorted(allowed)}")
        if isinstance(item.error, Cancelled):
            raise Violation(f"{name} was told that it had left: {item.error.message}")
        fits = length <= min(self._limits) - 1
        if isinstance(item.error, NeverFits) and fits:
            raise Violation(f"{name} of {length} tokens was refused, limits {self._limits}: {item.error.message}")
        if isinstance(item.error, InvalidRequest) and not isinstance(item.error, NeverFits) and self._tidy:
            raise Violation(f"{name} was refused as invalid: {item.error.message}")

    @property
    def _tidy(self) -> bool:
        faults = self._net.faults
        return not (faults.lose or faults.duplicate or faults.reset)

    def _ended(self, problem: str) -> None:
        if self.over:
            return
        if not problem:
            raise Violation(f"{self.request.request_id}: the stream closed without a terminal event")
        self._finish(problem)

    def _leave(self) -> None:
        if not self.over and self._exchange is not None:
            self.clock.note("client", self.request.request_id, "leaves")
            self._exchange.close()
            self._finish("left")

    def _finish(self, outcome: str) -> None:
        self.over = True
        self.outcome = outcome
        self._on_over(self)

    def _must_be_over(self) -> None:
        if not self.over:
            raise Violation(f"{self.request.request_id} has no terminal event {SLACK_S:g} s after its timeout")

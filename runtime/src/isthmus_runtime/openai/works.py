"""One request from its body to the end of its answer: planned on the event loop or off it, counted in the budgets of
all requests, within its tenant's limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ..errors import InvalidRequest
from ..interfaces.backend import Backend
from ..metrics import RequestMetrics, TenantMetrics
from ..request import Structure
from ..serving.call import Call
from ..serving.memory import MemoryGuard
from ..sharing.budget import End
from ..structured.checker import Checker
from ..tokenising import LONG
from ..tracing.span import Span, current
from .answer import Runner
from .batches import WIDTH, Batch, BatchRunner
from .budgets import Budgets
from .chat import NeedsThread
from .job import Job, kept_by, takes_turns
from .lifecycle import Lifecycle, Progress, known_as, whose
from .plan import Plan
from .planning import Planning
from .sse import Usage
from .tenants import Tenant
from .tenants_file import TenantsFile
from .writers import Writers

_BRIEF_BATCH_BYTES = 200
"""Batches above this are planned on threads: each text, of which one letter is enough, may be rendered by a template
(0.15 ms)."""
_ID_BYTES = 12
"""Of a token of a prompt while it waits for an engine: its place among the ids, and what is beside them."""
_Work = TypeVar("_Work", Job, Batch)


class Works:
    """Works on all requests that generate, embed or score."""

    def __init__(
        self,
        backend: Backend,
        requests: Lifecycle,
        planning: Planning,
        *,
        model: str,
        tenants: TenantsFile | None,
        metrics: RequestMetrics | None,
        tenant_metrics: TenantMetrics | None,
        grammars: Checker | None,
        memory: MemoryGuard,
        clock: Callable[[], float],
    ) -> None:
        """`model`: what traces call it. `grammars` None: requests for structured output are refused."""
        writers = Writers()
        self._runner = Runner(backend, writers, metrics, clock)
        self._batches = BatchRunner(backend, writers, metrics, clock)
        self._requests = requests
        self._model = model
        self._tenants = tenants
        self._tenant_metrics = tenant_metrics
        self._grammars = grammars
        self._planning = planning
        self._budgets = Budgets()
        memory.add_book(self._runner.untold)

    async def generate(self, call: Call, plan: Plan, progress: Progress) -> None:
        """Plan what a body asks for, and answer it as it is generated."""
        progress.stage = "reading"
        body = await call.read()
        progress.stage, who = "planning", whose(call, progress.tenant)
        span = current()
        tokenise = span.child("tokenise")
        try:
            job = await self._plan(who, plan, body)
        finally:
            tokenise.end()
        if span.recording:
            _describe_job(span, job, self._model)
        del body  # megabytes, which an answer would keep as long as it streams
        tokens = sum(len(request.prompt_token_ids) for request in job.requests[:: job.n])
        echoed = sum(echo.bytes_held for echo in job.echoes)
        kept = kept_by(job)
        call.drop(kept + tokens * _ID_BYTES + echoed, who)
        end = self._requests.end()
        with self._budgets.kept.holding(kept, who, end), self._budgets.echoes.holding(echoed, who, end):
            await self._run_planned(call, job, progress, who, tokens, end)

    async def _run_planned(self, call: Call, job: Job, progress: Progress, client: str, tokens: int, end: End) -> None:
        job.client = client
        if job.stream or takes_turns(job):
            job.requests = tuple(replace(request, client=known_as(client)) for request in job.requests)
            if job.structure is not None:
                await self._check_structure(job.structure, job.structure_param, client)
        progress.stage, progress.answer_id, progress.format = "generation", job.answer_id, job.format
        tokens += len(job.requests[0].sampling.allowed_token_ids)  # of all choices, which share them
        budgets = self._budgets
        with budgets.scores.holding(job.scores, client, end) as job.told, budgets.tokens.holding(tokens, client, end):
            run = self._runner.stream if job.stream else self._runner.whole
            usage = await self._within(
                progress.tenant, len(job.requests), job, lambda own: run(own, progress.arrived, call)
            )
        if (span := current()).recording:
            _describe_answer(span, usage)

    async def batch(self, call: Call, plan: Callable[[bytes], Batch], progress: Progress) -> None:
        """`generate` for a batch, which is answered in one piece."""
        progress.stage = "reading"
        body = await call.read()
        progress.stage, who = "planning", whose(call, progress.tenant)
        tokenise = current().child("tokenise")
        try:
            if len(body) <= _BRIEF_BATCH_BYTES:
                batch = await self._planning.short(who, partial(plan, body))
            else:
                batch = await self._planning.long(who, plan, body)
        finally:
            tokenise.end()
        del body
        batch = replace(batch, client=who)
        call.drop(batch.prompt_tokens * _ID_BYTES, who)
        progress.stage, progress.answer_id = "generation", batch.answer_id
        end, budgets = self._requests.end(), self._budgets
        with budgets.numbers.holding(batch.numbers, who, end), budgets.tokens.holding(batch.prompt_tokens, who, end):
            tenant = progress.tenant
            width = min(WIDTH, len(batch.requests), (tenant and tenant.concurrency) or WIDTH)
            usage = await self._within(
                tenant, width, batch, lambda own: self._batches.run(own, width, progress.arrived, call)
            )
        if (span := current()).recording:
            span.set({"gen_ai.request.model": self._model, "gen_ai.response.id": batch.answer_id})
            _describe_answer(span, usage)

    async def _within(
        self, tenant: Tenant | None, generations: int, work: _Work, run: Callable[[_Work], Awaitable[Usage]]
    ) -> Usage:
        """What a tenant's `work` has used, run as its own and within its limits."""
        if tenant is None:
            return await run(work)
        assert self._tenants is not None
        with self._tenants.tenants.running(tenant, generations):
            usage = await run(tenant.own(work))
        if self._tenant_metrics is not None:
            self._tenant_metrics.used(tenant.name, usage.prompt_tokens, usage.completion_tokens)
        return usage

    async def _check_structure(self, structure: Structure, param: str, who: str) -> None:
        if self._grammars is None:
            raise InvalidRequest(f"{param}: not available here", param=param)
        await self._grammars.check(structure, param, who)

    async def _plan(self, who: str, plan: Plan, body: bytes) -> Job:
        """A short body is planned on the event loop, unless that turns out to take long."""
        if len(body) <= LONG:
            try:
                return await self._planning.short(who, partial(plan, body, briefly=True))
            except NeedsThread:
                pass
        return await self._planning.long(who, plan, body)


def _describe_job(span: Span, job: Job, model: str) -> None:
    """What was asked for, by the conventions for generative AI; nothing of the prompt itself."""
    sampling = job.requests[0].sampling
    span.set(
        {
            "gen_ai.provider.name": "isthmus",
            "gen_ai.request.model": model,
            "gen_ai.response.id": job.answer_id,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.choice.count": len(job.requests),
            "gen_ai.request.stream": job.stream,
        }
    )


def _describe_answer(span: Span, usage: Usage) -> None:
    span.set(
        {
            "http.response.status_code": 200,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
    )

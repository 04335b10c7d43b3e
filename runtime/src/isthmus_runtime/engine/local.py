"""An engine whose thread runs in this process, and the grammars that its requests are compiled to."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import Cancelled, EngineFailed, InvalidRequest, RequestError
from ..interfaces.steps import Constraint
from ..protocol.calls import CommitCall
from ..protocol.ticket import Ticket
from ..request import FinishReason, GenerateRequest, Structure, TokenChunk
from ..structured.grammars import Grammars
from ..threads import running_pool, send
from .adapter_file import ListedAdapters
from .adapter_registry import AdapterRegistry
from .exchange import Sink
from .grammar_line import GrammarLine
from .long_lived import LongLived
from .loop import EngineLoop
from .seam import Engine, EngineStatus

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Compiling:
    """A request that is not the loop's yet."""

    request_id: str
    attempt: str


class LocalEngine(Engine):
    """`loop` as an `Engine`. Any thread may call it."""

    def __init__(
        self,
        loop: EngineLoop,
        sink: Sink,
        *,
        grammars: Callable[[], Grammars] | None = None,
        threads: LongLived | None = None,
        adapters: AdapterRegistry | None = None,
        listed: ListedAdapters | None = None,
    ) -> None:
        """`sink`: the loop's. `grammars` reads the tokenizer at the first request that is structured; None: there is
        none to read. `threads`: without which this process is of no use. `listed`: those of a file."""
        self.loop = loop
        self.adapters = adapters or AdapterRegistry(loop, None)
        self._listed = listed
        self._sink = sink
        self._grammars = grammars
        self._loaded: Grammars | None = None
        self._threads = threads
        # One thread, of its own: a request with n = 128 finds compiled what its first choice has waited for, and
        # what else is done in threads (large bodies) does not wait for any of it.
        self._compiler = running_pool(1, "grammars")
        self._changed = threading.Lock()
        self._compiling: dict[str, _Compiling] = {}
        self._line: GrammarLine[Callable[[], None]] = GrammarLine()

    @property
    def max_model_len(self) -> int:
        """See `Engine`."""
        return self.loop.scheduler.max_model_len

    def generate(
        self,
        request: GenerateRequest,
        *,
        attempt: str = "",
        local_attempt: str = "",
        peer_url: str = "",
        peer_epoch: str = "",
    ) -> None:
        """See `Engine`."""

        def run(constraint: Constraint | None) -> None:
            self.loop.generate(
                request,
                attempt=attempt,
                local_attempt=local_attempt,
                peer_url=peer_url,
                peer_epoch=peer_epoch,
                constraint=constraint,
            )

        self._compiled(request, attempt or local_attempt, run)

    def prefill(self, request: GenerateRequest, attempt: str, ticket: Ticket | None) -> None:
        """See `Engine`."""
        self._compiled(request, attempt, lambda constraint: self.loop.prefill(request, attempt, ticket, constraint))

    def ticket(self, ticket: Ticket) -> None:
        """See `Engine`."""
        self.loop.ticket(ticket)

    def commit(self, call: CommitCall) -> None:
        """See `Engine`."""
        self.loop.commit(call)

    def abort(self, request_id: str, attempt: str, reason: str, *, answer: bool = True) -> None:
        """See `Engine`."""
        with self._changed:
            found = [
                sid
                for sid, waits in self._compiling.items()
                if (waits.attempt == attempt if attempt else waits.request_id == request_id)
            ]
            for sid in found:
                del self._compiling[sid]
        if answer:
            error = Cancelled(reason).located("admission", attempt)
            self._sink([(sid, TokenChunk(finish_reason=FinishReason.ABORT, error=error)) for sid in found])
        self.loop.abort(request_id, attempt, reason, answer=answer)

    async def is_drained(self, attempt: str) -> bool:
        """See `Engine`."""
        return self.loop.is_drained(attempt)

    async def change_adapter(self, name: str, path: str | None, *, replace: bool = False) -> None:
        """See `Engine`."""
        await asyncio.to_thread(self.adapters.change, name, path, replace=replace)

    def trim(self) -> None:
        """See `Engine`: whoever asks does so for this process."""

    def status(self) -> EngineStatus:
        """See `Engine`."""
        loop = self.loop
        return EngineStatus(
            snapshot=loop.snapshot,
            failure=loop.failure,
            problem="" if self._threads is None else self._threads.problem(),
            stalled_s=loop.stalled_s(),
            transfer_failures=dict(loop.exchange.transfer_failures),
            moved=loop.handoff_stats(),
            adapters=self.adapters.names,
            adapter_list=None if self._listed is None else self._listed.status,
        )

    def _compiled(self, request: GenerateRequest, attempt: str, run: Callable[[Constraint | None], None]) -> None:
        """Call `run` with what the request's text must be, at once or when that is compiled; not if it was aborted."""
        structure = request.structure
        known = None if structure is None or self._loaded is None else self._loaded.known(structure, request.whose)
        if structure is None or known is not None:
            run(known)
            return
        sid, waits = attempt or request.request_id, _Compiling(request.request_id, attempt)

        def compile_and_run() -> None:
            if self._compiling.get(sid) is not waits:  # it has left meanwhile
                return
            found: Constraint | RequestError
            try:
                found = self._guide(structure, request.whose)
            except RequestError as error:
                found = error.with_traceback(None)  # which holds what was compiled
            except BaseException as error:  # one request ends, the thread goes on; Rust's panics are no Exception
                _log.exception("a grammar could not be compiled")
                found = EngineFailed(f"structured output failed: {error}")
            with self._changed:
                # Under the lock, so that an abort which comes now follows it, and a later request of this id as well.
                if self._compiling.get(sid) is not waits:
                    return
                del self._compiling[sid]
                if isinstance(found, RequestError):
                    refusal = found.located("admission", attempt)
                    self._sink([(sid, TokenChunk(finish_reason=FinishReason.ERROR, error=refusal))])
                else:
                    run(found)

        with self._changed:
            self._compiling[sid] = waits
            self._line.add(request.whose, len(structure.text), compile_and_run)
        # The API layer has seen it compiled within its limits; it is still more than a caller has time for.
        send(self._compiler, self._compile_next)

    def _compile_next(self) -> None:
        with self._changed:
            whose, work = self._line.next()
        began = time.thread_time()
        try:
            work()
        finally:
            with self._changed:
                self._line.took(whose, time.thread_time() - began)

    def _guide(self, structure: Structure, whose: str) -> Constraint:
        if self._grammars is None:
            raise InvalidRequest("structure: this engine has no tokenizer to build masks with", param="structure")
        self._loaded = self._grammars()
        self._loaded.told = self.loop.end_lost
        return self._loaded.guide(structure, whose)

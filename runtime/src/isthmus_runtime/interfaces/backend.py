"""API <-> whatever serves: the local engine, or the router's pair of remote ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol, runtime_checkable

from ..request import GenerateRequest, ServedTask, TokenChunk

Said = bool | Callable[[], Awaitable[bool]]
"""Whether more chunks are wanted; or what has to be awaited before the next one, and then tells that."""
Take = Callable[[TokenChunk], Said]
"""Takes one chunk. What it raises ends the request."""


class Backend(Protocol):
    """Turns requests into tokens: the local engine, or the router's pair of remote ones."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, tokens; 0 while unknown (not ready)."""

    @property
    def task(self) -> ServedTask:
        """What the model is served for; meaningful once `max_model_len` is known."""

    def ready(self) -> str:
        """Empty when requests can be served now, else the one reason why not, as clients may know it."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the answer; the last chunk has a finish reason. With `pooling` there is one, with the vector.
        Closing the generator cancels the request.

        Raises RequestError when it is refused before the first chunk; afterwards errors arrive as the last chunk.
        """


@runtime_checkable
class Pushing(Protocol):
    """A Backend that can do without waking a task for each chunk."""

    async def push(self, request: GenerateRequest, take: Take) -> None:
        """`generate`, whose chunks `take` gets where they arrive: on the event loop, maybe outside of this task.
        Returns when the answer has ended or no more is wanted. Raises as `generate`, and what `take` raises."""

"""Bodies of the calls between router and engines, and their answers."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from ..request import TokenLogprobs
from .base import Wire
from .request import WireRequest
from .ticket import ATTEMPT, Ticket

PEER_URL = r"^(http://([0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5})?$"
"""An engine's address as discovery makes it: an IP address and a port, no name, no path, no user."""


class GenerateCall(Wire):
    """Run a request on decode or unified; with `attempt` set its KV comes from a prefill peer."""

    request: WireRequest
    attempt: str = Field(default="", pattern=ATTEMPT)
    """Empty: compute the prompt locally."""
    local_attempt: str = ""
    """Without `attempt`, this attempt's name: an abort of an earlier one, which comes late, must not end it."""
    prefill_url: str = Field(default="", pattern=PEER_URL)
    """Peer to ask for the drain acknowledgement; from the router's discovery only."""
    prefill_epoch: str = ""


class PrefillCall(Wire):
    """Compute the prompt, send KV as `ticket` says."""

    request: WireRequest
    attempt: str = Field(min_length=1, pattern=ATTEMPT)
    ticket: Ticket | None = None
    """None: a TicketCall brings it, once decode has reserved. For requests that `may_begin_early`."""


class TicketCall(Wire):
    """The ticket of a prompt that was begun without. Ignored where that has ended."""

    ticket: Ticket


class PrefillAnswer(Wire):
    """Everything was sent, the record last."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    attempt: str
    num_tokens: int
    cached_tokens: int = 0
    sent_bytes: int = 0
    transfer_s: float = 0.0
    """Seconds between the end of the prompt's computation and the record's write: what was not hidden."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens from the second on, where the request asks for them: the router has them before decode
    may start, so they need no room in the record."""


class CommitCall(Wire):
    """The router's word about the prefill leg."""

    request_id: str
    attempt: str
    ok: bool
    stage: str = ""
    reason: str = ""
    first_token: int | None = Field(default=None, ge=0)
    """The client has it already, from prefill: should the KV not come, decode goes on from it. None: nothing was told,
    and nothing is written, for engines of an older version."""


class AbortCall(Wire):
    """End one attempt at a request, wherever it is; with an empty `attempt` the request."""

    request_id: str
    attempt: str = ""


class AdapterCall(Wire):
    """Have an adapter, or have it no more."""

    name: str = Field(min_length=1, max_length=256)
    path: str | None = Field(default=None, max_length=4096)
    """In the engine's folder of adapters; None: unload it."""
    replace: bool = False

"""What a request has come to once it was checked and planned: what is generated for it, and how it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from sys import getsizeof

from ..request import GenerateRequest, Structure
from ..tokenising import LONG
from .detokenizer import Stops
from .output import Reader
from .pieces import Pieces
from .prompts import Echo
from .sse import Format


@dataclass(slots=True, kw_only=True)
class Job:
    """A request that was checked, and tokenised or left as text. Nobody changes it: to freeze so many fields would
    take longer than to set them."""

    answer_id: str
    requests: tuple[GenerateRequest, ...]
    """One for each choice, in the order of `index`."""
    n: int
    """Choices per prompt. They share its KV: the others begin when the first has a token, and so find it in the prefix
    cache."""
    shown: int
    """How many of them are told, the likeliest; less than `n` for the best of several."""
    stops: Stops | None
    """The strings that end the text."""
    structure: Structure | None
    """What the text of each choice must be."""
    structure_param: str
    """The parameter that says so."""
    logprobs: bool
    scores: int
    """Log-probabilities of prompts that the answer tells."""
    stream: bool
    include_usage: bool
    format: Format
    pieces: Pieces
    include_stop: bool = False
    """What ends the text, a stop string or a stop token, is part of it."""
    return_ids: bool = False
    continuous_usage: bool = False
    """Each chunk of a stream tells the tokens so far."""
    reader: Callable[[], Reader] | None = None
    """Takes the text of a choice apart. None: all of it is content."""
    show_cached: bool = True
    """Usage tells what prefix caches had."""
    one_call: bool = False
    """The first call of a tool ends the choice."""
    echoes: tuple[Echo, ...] = ()
    """The prompts, where the answer repeats them."""
    silent: bool = False
    """The one token that engines generate at least is left out: only the prompt is of interest."""
    client: str = ""
    """Whose it is, where that is known."""
    told: Callable[[], None] = lambda: None
    """To be called when nothing is kept any more of what the answer tells of prompts."""
    tells_end: bool = False
    """The token that ends a text has its log-probabilities told, though it is no part of the text."""


def kept_by(job: Job) -> int:
    """Bytes that a job keeps of its body and that no other budget counts."""
    texts = sum(getsizeof(request.prompt.text) for request in job.requests[:: job.n] if request.prompt is not None)
    structure = 0 if job.structure is None else getsizeof(job.structure.text)
    stops = 0 if job.stops is None else job.stops.bytes_held
    return texts + structure + job.format.repeated + stops


def takes_turns(job: Job) -> bool:
    """Whether what engines do for it is done in turns of clients. Of a stream they keep what its client has not read,
    and know whose that is as well."""
    text = job.requests[0].prompt
    return job.structure is not None or (text is not None and len(text.text) > LONG)

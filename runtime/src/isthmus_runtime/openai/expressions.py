"""What the regular expressions and the normalizer of a tokenizer.json can cost, as their forms tell. Pure.

The library tries an expression anew at each character of a text, with no limit but one on a single match, and a thread
that it holds cannot be ended.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

from tokenizers import Regex, pre_tokenizers

from ..sharing.threads_in_turns import go_on


def is_steady(tokenizer: Mapping[str, Any]) -> bool:
    """Whether the expressions of a tokenizer.json have a form that never takes long over a short text: some tenths of a
    second for 4 KB. `Runs` tells which long texts may take long."""
    patterns = expressions(tokenizer)
    normalizers = list(_steps(tokenizer.get("normalizer")))
    if sum(map(len, patterns)) > _MOST_CHARACTERS or prod(map(_growth, normalizers)) > _MOST_GROWTH:
        return False
    costs = [cost for pattern in patterns for cost in _costs(pattern)]
    known = [cost for cost in costs if cost is not None]
    again = sum(cost.again for cost in known)
    # `Runs` looks at texts as they are sent.
    seen = not again or all(step.get("type") == "NFC" for step in normalizers)
    return (
        seen and len(known) == len(costs) and sum(cost.steps for cost in known) <= _MOST_STEPS and again <= _MOST_AGAIN
    )


def expressions(tokenizer: Mapping[str, Any]) -> list[str]:
    """The regular expressions of a tokenizer.json."""
    return list(_expressions([tokenizer.get("pre_tokenizer"), tokenizer.get("normalizer")]))


def _expressions(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        found = value.get("Regex")
        if isinstance(found, str):
            yield found
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _expressions(inner)


_MOST_GROWTH = 32
"""Times that a normalizer may make a text longer. NFKD does so 18 times."""


def _steps(normalizer: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(normalizer, Mapping):
        return
    if normalizer.get("type") == "Sequence":
        for step in normalizer.get("normalizers") or ():
            yield from _steps(step)
    else:
        yield normalizer


def _growth(step: Mapping[str, Any]) -> float:
    """Most characters that one becomes in a step of a normalizer, so far as the file decides that."""
    match step.get("type"):
        case "Replace":
            content, pattern = len(step.get("content") or ""), step.get("pattern") or {}
            # An expression may fit between two letters.
            return max(1, content / max(1, len(pattern["String"]))) if pattern.get("String") else 1 + content
        case "Prepend":
            return 1 if len(step.get("prepend") or "") <= _MOST_GROWTH else inf
        case "Precompiled":
            # A trie, its length before it, and the texts that it leads to (SentencePiece).
            packed = b64decode(step.get("precompiled_charsmap") or "")
            return max(1, *map(len, packed[4 + int.from_bytes(packed[:4], "little") :].split(b"\0")), 1)
    return 1


class Runs:
    """Finds what takes a steady tokenizer long: letters in a row that one of its expressions takes, one after the
    other, and then again from each of them on. DeepSeek V2's `\\s+$` does so with spaces before a digit: an hour for a
    million of them."""

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        again: dict[str, int] = {}
        for pattern in expressions(tokenizer):
            for cost in filter(None, _costs(pattern)):
                if cost.again:
                    again[cost.letters] = again.get(cost.letters, 0) + cost.again
        self._kinds = [
            (_finder(letters, _SHORT_RUN // _STRIDE - 1), _finder(letters, _SHORT_RUN), times)
            for letters, times in again.items()
        ]
        self._most_times = sum(again.values())

    def are_slow(self, text: str) -> bool:
        """Whether a text has so long ones. At most half of a run is not seen where it lies on a boundary of the parts
        that are looked at."""
        if len(text) ** 2 * self._most_times <= _MOST_OF_RUNS:
            return False
        spent = 0
        for start in range(0, len(text), _LOOKED_AT):
            go_on()
            part = text[start : start + _LOOKED_AT]
            for sampled, whole, times in self._kinds:
                if _lengths(sampled, part[::_STRIDE]):
                    spent += sum(times * length**2 for length in _lengths(whole, part))
        return spent > _MOST_OF_RUNS


_SHORT_RUN = 512
"""Runs that are shorter are not counted."""
_MOST_OF_RUNS = 1 << 26
"""Twice the steps: 0.3 s where one takes 9 ns, as for ASCII; other letters take up to five times that."""
_STRIDE = 16
"""Whether there is a run at all is seen from one letter in so many."""
_LOOKED_AT = 1 << 16
"""Characters at a time: a search does not let other threads run."""


def _finder(letters: str, least: int) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(f"(?<!{letters})(?>{letters}{{{least},}})"), "removed")


def _lengths(finder: pre_tokenizers.PreTokenizer, text: str) -> list[int]:
    """Of the runs of a text: what is between the pieces that are left."""
    ends = [0, *(place for _, piece in finder.pre_tokenize_str(text) for place in piece), len(text)]
    return [end - start for start, end in zip(ends[::2], ends[1::2], strict=True) if end > start]


@dataclass(frozen=True, slots=True)
class _Cost:
    """Of one alternative of an expression."""

    steps: int
    """At a character, until it fits or does not, but for what it repeats."""
    again: int = 0
    """Steps after each letter that it repeats, where all of them are tried again from the next letter on."""
    letters: str = ""
    """Those letters: an expression for one of them."""


_UNSURE = re.compile(r"\\[gkGK\dXRNOyY]|\(\?(?!i:|:|=|!|<=|<!)")
"""Calls, references, names, conditions, options: what repeats without looking so; graphemes and their like, which cost
more than a letter."""
_ATOM = re.compile(r"\\[pP]\{[^}]*\}|\\.|[^|()?*+{}\[\]\\]", re.S)
_IN_CLASS = re.compile(r"\\.|\[:\w+:\]|[^\]\\\[]", re.S)
"""A letter, a range's end, an escape, or one of the && of an intersection."""
_CLASS_BEGINS = re.compile(r"\[\^?\]?")
_MOST_NESTED = 8
_FIRST = 0xE000
_X = "[\ue000-\uf8ff]"
"""A letter or class in a masked expression: its number, as a character that stands for nothing else."""
_TIMES = re.compile(r"\{\d+,\}")
_COUNTED_LAST = re.compile(r"\{\d(?:,\d)?\}\+(?=\||$)")
"""Nothing comes after it for which it is taken in another way."""
_PLAIN_GROUP = re.compile(rf"\((?:\?(?:i:|:|=|!|<=|<!))?({_X}+(?:\|{_X}+)*)\)")
_PART = re.compile(rf"(?:(?P<one>{_X})|<(?P<ways>\d+)(?P<all>{_X}+)>)(?P<times>[*+?]|\{{\d(?:,\d)?\}}|)")
"""A letter or class, or a group of so many alternatives."""
_MOST_CHARACTERS = 4096
"""Of all expressions of a tokenizer. Known ones have some hundreds."""
_MOST_STEPS = 1024
"""Of a tokenizer's expressions at each character of a text: 0.1 s for 4 KB. Known ones have less than 200."""
_MOST_AGAIN = 4
"""The same after each letter of a run, which is tried again: 0.1 s for 4 KB where nothing fits. The expression of o200k
has four."""


def _costs(pattern: str) -> Iterator[_Cost | None]:
    """Of each alternative. None: it may take longer than any of that form."""
    if _UNSURE.search(pattern) or len(pattern) > _MOST_CHARACTERS:
        yield None
        return
    masked, atoms = _masked(pattern)
    # What gives nothing back, or takes as little as it can, is tried in no more ways than what does neither. But a
    # number of times is repeated by + and *, as in Ruby: (?:x{1,3})+.
    plain = _TIMES.sub("+", re.sub(r"([*+?])[+?]|(\})\?", r"\1\2", masked))

    def repeated(last: re.Match[str]) -> str:
        within_a_group = plain.count("(", 0, last.start()) > plain.count(")", 0, last.start())
        return last[0] if within_a_group else "+"

    plain = _COUNTED_LAST.sub(repeated, plain)
    form = _PLAIN_GROUP.sub(lambda group: f"<{group[1].count('|') + 1}{group[1].replace('|', '')}>", plain)
    for one in form.split("|"):
        yield _cost(one, atoms)


@dataclass(frozen=True, slots=True)
class _Part:
    one: bool
    """A letter or class, and no group."""
    ways: int
    """Alternatives of a group; 1 for a letter."""
    times: str
    atoms: str
    """All letters of all of them, masked."""

    @property
    def repeats(self) -> bool:
        return self.times in ("*", "+")

    def counts(self) -> tuple[int, int]:
        """Least and most times, of what is not repeated without end."""
        if self.times == "?":
            return 0, 1
        least, _, most = self.times.strip("{}").partition(",")
        return int(least or 1), int(most or least or 1)


def _cost(form: str, atoms: Sequence[str]) -> _Cost | None:
    """What stands for itself, or may be missing; then one repetition and a part of one letter, or two repetitions. What
    comes after those is tried in as many ways as a text has letters, and squared where the next one begins anew."""
    parts, end = [], 0
    for found in _PART.finditer(form):
        if found.start() != end:
            return None
        one = found["one"] is not None
        parts.append(_Part(one, int(found["ways"] or 1), found["times"], found["one"] or found["all"]))
        end = found.end()
    if end != len(form):
        return None
    steps, ways, at = 0, 1, 0
    while at < len(parts) and not parts[at].repeats:
        part = parts[at]
        least, most = part.counts()
        steps += ways * len(part.atoms) * sum(part.ways**count for count in range(most))
        ways *= sum(part.ways**count for count in range(least, most + 1))
        at += 1
        if steps > _MOST_STEPS or ways > _MOST_STEPS:
            return None
    match parts[at:]:
        case []:
            return _Cost(steps)
        # A group of alternatives that is repeated takes each letter in any of them.
        case [_Part(ways=1)]:
            return _Cost(steps + ways)
        case [_Part(one=True) as first, _Part(times="") as last]:
            letters = atoms[ord(first.atoms) - _FIRST]
            return _Cost(steps + ways + len(last.atoms), ways * len(last.atoms), letters)
        case [_Part(one=True) as first, _Part(ways=1) as second, *rest] if second.repeats and (
            not rest or (len(rest) == 1 and rest[0].times == "?")
        ):
            steps += ways + sum(len(part.atoms) for part in rest)
            letters = atoms[ord(first.atoms) - _FIRST]
            return _Cost(steps, ways, letters) if second.times == "+" else _Cost(steps)
    return None


def _masked(pattern: str) -> tuple[str, list[str]]:
    """With a character for each letter or class, by its number; and those."""
    head = re.compile(r"\(\?(?:i:|:|=|!|<=|<!)|[*+?]|\{\d+(?:,\d*)?\}")
    made, at = "", 0
    atoms: list[str] = []
    while at < len(pattern):
        operator = head.match(pattern, at)
        atom = None if operator else _ATOM.match(pattern, at)
        end = operator.end() if operator else atom.end() if atom else _class_end(pattern, at)
        if operator or end <= at:
            end = max(end, at + 1)
            made += pattern[at:end]
        else:
            made += chr(_FIRST + len(atoms))
            atoms.append(pattern[at:end])
        at = end
    return made, atoms


def _class_end(pattern: str, at: int, depth: int = 0) -> int:
    """Where the class that begins at `at` ends, with those within it; 0: none does."""
    begins = _CLASS_BEGINS.match(pattern, at)
    if begins is None or depth > _MOST_NESTED:
        return 0
    at = begins.end()
    while at < len(pattern):
        if pattern[at] == "]":
            return at + 1
        found = _IN_CLASS.match(pattern, at)
        at = _class_end(pattern, at, depth + 1) if found is None else found.end()
        if not at:
            return 0
    return 0

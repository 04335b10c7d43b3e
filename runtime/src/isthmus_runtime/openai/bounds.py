"""What is sure about a text before it is tokenised: how few tokens it can have, and where it may be cut. Pure.

A prompt of megabytes costs seconds of tokenising, and most such prompts are far beyond the model's limit.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .pieces import byte_level_alphabet

_PUNCTUATION = ".,;:!?。、，；：！？"
"""No letter, number or combining mark, and part of no contraction."""
_CUT = re.compile(rf"(?<=\S) |(?<=[^\W_])(?=[{re.escape(_PUNCTUATION)}])")
_NFC_SHRINKS = 9
"""Most bytes that become one byte of NFC: a singleton takes up to 3 for each, and composition again 3 (UTF-8)."""

_NFC_GROWS = 3
"""Most bytes of NFC that one byte becomes (UTF-8; UAX 15): some characters are excluded from composition."""


@dataclass(frozen=True, slots=True)
class TokenBound:
    """Every token stands for at most `longest` bytes of the normalised text."""

    longest: int
    dropped: bytes
    """Bytes that the vocabulary does not have: the tokenizer leaves them out, or merges them into one unknown token."""
    composes: bool
    """The text is normalised to NFC, which may shorten it."""

    def least(self, text: str) -> int:
        """Tokens that `text` surely has."""
        size = len(text.encode("utf-8", "surrogatepass").translate(None, self.dropped))
        if self.composes and not text.isascii() and not unicodedata.is_normalized("NFC", text):
            size //= _NFC_SHRINKS
        return -(-size // self.longest)


def token_bound(tokenizer: Mapping[str, Any]) -> TokenBound | None:
    """The bound of a tokenizer.json, or None where a token may stand for any length of text: unknown words, a
    pre-tokenizer or normalizer that drops something, tokens that take the white space around them."""
    model = tokenizer.get("model") or {}
    vocab = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocab, Mapping) or not vocab:
        return None
    added = tokenizer.get("added_tokens") or ()
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    cutters = _parts(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if any(part.get("type") not in ("ByteLevel", "Digits", "Metaspace", "Split") for part in cutters):
        return None
    if any(part.get("type") == "Split" and part.get("behavior") == "Removed" for part in cutters):
        return None
    byte_level = any(part.get("type") == "ByteLevel" for part in cutters)
    if not byte_level and not (model.get("byte_fallback") and all(f"<0x{b:02X}>" in vocab for b in range(256))):
        return None
    normalizers = _parts(tokenizer.get("normalizer"), "normalizers")
    if not all(map(_keeps_length, normalizers)):
        return None
    # In a byte-level vocabulary each character of a token is a byte of the text.
    sizes = map(len, vocab) if byte_level else (len(token.encode()) for token in vocab)
    longest = max(*sizes, *(len(token["content"].encode()) for token in added), 1)
    dropped = bytes(b for c, b in byte_level_alphabet().items() if c not in vocab) if byte_level else b""
    return TokenBound(longest, dropped, any(part.get("type") == "NFC" for part in normalizers))


def growth(tokenizer: Mapping[str, Any]) -> int | None:
    """Most tokens that a byte of a text becomes, for a tokenizer.json; 1 for each of ASCII. None: that is not known.

    A byte-level vocabulary begins with a symbol for each byte and merges from there.
    """
    model = tokenizer.get("model") or {}
    cutters = _parts(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if model.get("type") != "BPE" or not any(part.get("type") == "ByteLevel" for part in cutters):
        return None
    if any(
        part.get("type") not in ("ByteLevel", "Digits", "Split") or part.get("add_prefix_space") for part in cutters
    ):
        return None
    normalizers = _parts(tokenizer.get("normalizer"), "normalizers")
    if any(part.get("type") != "NFC" for part in normalizers):
        return None
    return _NFC_GROWS if normalizers else 1


def is_steady(tokenizer: Mapping[str, Any]) -> bool:
    """Whether the expressions of a tokenizer.json have a form that never takes long over a short text. One match of the
    library takes some tenths of a second at most, and a text may have one at each word."""
    patterns = expressions(tokenizer)
    if sum(map(len, patterns)) > _MOST_CHARACTERS:
        return False
    costs = [cost for pattern in patterns for cost in _costs(pattern)]
    ways, again = (sum(cost[part] for cost in costs if cost) for part in (0, 1))
    return None not in costs and ways <= _MOST_WAYS and again <= _MOST_AGAIN


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


_UNSURE = re.compile(r"\\[gkGK\dXRNOyY]|\(\?(?!i:|:|=|!|<=|<!)")
"""Calls, references, names, conditions, options: what repeats without looking so; graphemes and their like, which cost
more than a letter."""
_ATOM = re.compile(r"\\[pP]\{[^}]*\}|\\.|[^|()?*+{}\[\]\\]", re.S)
_IN_CLASS = re.compile(r"\\.|\[:\w+:\]|[^\]\\\[]", re.S)
"""A letter, a range's end, an escape, or one of the && of an intersection."""
_CLASS_BEGINS = re.compile(r"\[\^?\]?")
_MOST_NESTED = 8
_TIMES = re.compile(r"\{\d+,\}")
_COUNTED_LAST = re.compile(r"\{\d(?:,\d)?\}\+(?=\||$)")
"""Nothing comes after it for which it is taken in another way."""
_PLAIN_GROUP = re.compile(r"\((?:\?(?:i:|:|=|!|<=|<!))?(x+(?:\|x+)*)\)")
_PART = re.compile(r"(?:x|<(?P<ways>\d+)>)(?P<times>[*+?]|\{\d(?:,\d)?\}|)")
"""A letter or class, or a group of so many alternatives."""
_MOST_CHARACTERS = 4096
"""Of all expressions of a tokenizer. Known ones have some hundreds."""
_MOST_WAYS = 64
"""In which a tokenizer's expressions are tried at each character of a text."""
_MOST_AGAIN = 4
"""Of those that are tried again for each letter of the text behind that character: 0.1 s for 4 KB where nothing fits.
The expression of o200k has four."""


def _costs(pattern: str) -> Iterator[tuple[int, int] | None]:
    """Of each alternative: in how many ways it is tried at a character, and how many of them are tried again for each
    letter that follows. None: it may be more than that."""
    if _UNSURE.search(pattern):
        yield None
        return
    # What gives nothing back, or takes as little as it can, is tried in no more ways than what does neither. But a
    # number of times is repeated by + and *, as in Ruby: (?:x{1,3})+.
    plain = _TIMES.sub("+", re.sub(r"([*+?])[+?]|(\})\?", r"\1\2", _masked(pattern)))

    def repeated(last: re.Match[str]) -> str:
        within_a_group = plain.count("(", 0, last.start()) > plain.count(")", 0, last.start())
        return last[0] if within_a_group else "+"

    plain = _COUNTED_LAST.sub(repeated, plain)
    form = _PLAIN_GROUP.sub(lambda group: f"<{group[1].count('|') + 1}>", plain)
    for one in form.split("|"):
        yield _cost(one)


def _cost(form: str) -> tuple[int, int] | None:
    """What stands for itself, or may be missing; then one repetition and a part of one letter, or two repetitions. What
    comes after those is tried in as many ways as a text has letters, and squared where the next one begins anew."""
    parts, end = [], 0
    for found in _PART.finditer(form):
        if found.start() != end:
            return None
        parts.append((int(found["ways"] or 1), found["times"]))
        end = found.end()
    ways, at = 1, 0
    while at < len(parts) and parts[at][1] not in ("*", "+"):
        ways *= _ways(*parts[at])
        at += 1
    if end != len(form) or ways > _MOST_WAYS:
        return None
    match parts[at:]:
        case []:
            return ways, 0
        # A group of alternatives that is repeated takes each letter in any of them.
        case [(1, _)]:
            return ways, 0
        case [(1, _), (last, "")]:
            return ways + last, ways
        case [(1, _), (1, "*" | "+" as second), *rest] if not rest or (len(rest) == 1 and rest[0][1] == "?"):
            return ways + sum(last for last, _ in rest), ways if second == "+" else 0
    return None


def _ways(alternatives: int, times: str) -> int:
    """In how many ways a part may be taken."""
    if times == "?":
        return alternatives + 1
    least, _, most = times.strip("{}").partition(",")
    first = int(least or 1)
    return sum(alternatives**count for count in range(first, int(most or first) + 1))


def _masked(pattern: str) -> str:
    """With an x for each letter or class."""
    head = re.compile(r"\(\?(?:i:|:|=|!|<=|<!)|[*+?]|\{\d+(?:,\d*)?\}")
    made, at = "", 0
    while at < len(pattern):
        found = head.match(pattern, at) or _ATOM.match(pattern, at)
        if found is not None:
            made += found[0] if found.re is head else "x"
            at = found.end()
        elif (end := _class_end(pattern, at)) > at:
            made, at = made + "x", end
        else:
            made, at = made + pattern[at], at + 1
    return made


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


def _parts(step: Any, name: str) -> Sequence[Mapping[str, Any]]:
    if not step:
        return ()
    return step.get(name) or () if step.get("type") == "Sequence" else (step,)


def _keeps_length(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer never makes a text shorter, NFC aside."""
    if step.get("type") == "Replace":
        pattern = (step.get("pattern") or {}).get("String")
        return isinstance(pattern, str) and len(step.get("content", "").encode()) >= len(pattern.encode())
    return step.get("type") in ("NFC", "Prepend")


def may_cut(added_tokens: Sequence[Mapping[str, Any]]) -> bool:
    """Whether `cut` keeps these tokens whole, for a tokenizer of which `words.cuts_at_words` holds."""
    return not any(set(token["content"]) & {*_PUNCTUATION, " "} for token in added_tokens)


_PLACE_IN_JSON = re.compile(
    rb"(?:(?<!\\)[g-km-z]|(?<=[a-df-km-z])[.,;:!?]) "
    rb"|(?:(?:\xe4[\xb8-\xbf]|[\xe5-\xe8][\x80-\xbf]|\xe9[\x80-\xbe])[\x80-\xbf]"
    rb"|\xe3(?:\x81[\x81-\xbf]|\x82[\x80-\x96\xa1-\xbf]|\x83[\x80-\xba]))"
    rb"(?:\xe3\x80[\x81\x82]|\xef\xbc[\x81\x8c\x9a\x9b\x9f])"
    rb"|\\u(?:(?:4[ef]|[5-8][0-9a-f]|9[0-9a-e])[0-9a-f]{2}|30(?:4[1-9a-f]|[5-8b-e][0-9a-f]|9[0-6]|a[1-9a-f]|f[0-9a]))"
    rb"\\u(?:300[12]|ff(?:01|0c|1a|1b|1f))",
    re.I,
)
"""A place that `_CUT` finds too, in whatever way JSON writes what is before it: a space after what no escape ends with,
nor anything but a text, or a wide punctuation mark after a Chinese or Japanese letter, in UTF-8 or escaped."""
_WIDE = bytes(range(0xE3, 0xEE))
"""First bytes of three, in UTF-8, of letters of East Asia, of which none becomes more in NFC."""
_COUNTED = 3 << 20
"""Bytes of a body whose letters are counted, in some milliseconds: a longer one has a million of them anyway."""


def longest_part(body: bytes, size: int) -> int:
    """Letters that the longest part may have which `cut` makes of a JSON body's texts; all of the body's, where that is
    not sure at a glance, as bytes, but of East Asian ones one for each. A millisecond a megabyte."""
    longest = start = 0
    while start + size < len(body):
        place = _PLACE_IN_JSON.search(body, start + size, start + 3 * size)
        if place is None:
            return len(body) if len(body) > _COUNTED else 2 * len(body.translate(None, _WIDE)) - len(body)
        longest, start = max(longest, place.end() - start), place.end()
    # A part of a text begins anywhere, up to `size` before what nothing cuts.
    return min(len(body), max(longest, len(body) - start) + size)


def cut(text: str, size: int) -> Iterator[str]:
    """`text` in parts of about `size` characters, so that the ids of the parts are those of the text.

    A part ends before a space that follows something other than white space, or between a letter or digit and a
    punctuation mark: no piece of a known pre-tokenizer has both. Where there is no such place, a part is longer.
    """
    start, looked = 0, size
    while looked < len(text):
        # No further than `size` at once: a search does not let other threads run.
        place = _CUT.search(text, looked, looked + size + 1)
        looked = place.start() if place else looked + size
        if place:
            yield text[start:looked]
            start, looked = looked, looked + size
    yield text[start:]

"""A model directory's tokenizer, chat template and generation defaults, as the API needs them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from ..errors import ConfigError, InvalidRequest
from ..request import SamplingOptions
from ..sharing.threads_in_turns import go_on
from ..tokenising import AT_ONCE
from .bounds import Letters, cut, growth, may_cut, token_bound
from .chat import SOME_MADE, SOME_STEPS, SOME_TEXT, ChatTemplate, Conversation, NeedsThread, TooCostly
from .control import ControlTokens, Marks
from .expressions import Runs, expressions, is_steady
from .long_texts import LongTexts
from .model_files import read_model_files, token_text
from .pieces import Pieces
from .text_ends import set_ends
from .words import Words, cuts_at_words

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

_SHOWN = 200
"""Characters of expressions that an error shows."""

_PART = 1 << 14
"""Characters of the parts that a text is cut into."""
_SOME = 1 << 12
"""Characters that are tokenised here whatever they are: also on an event loop."""
_HERE = AT_ONCE // 660
"""Characters of a text as it is normalised, above which it is tokenised in a process of its own: each takes 230 to 660
bytes meanwhile where none are merged."""


class TooManyTokens(Exception):
    """A text has more tokens than were asked for; the message says how many, in words."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the model sees it."""

    text: str
    ids: list[int] | None
    """None: nobody needs them yet, and they are as many as there may be."""


class Tokenizer:
    """Text to ids and back. Made by `load`; immutable, safe to use from several threads."""

    def __init__(
        self,
        tokenizer: HfTokenizer,
        *,
        config: Mapping[str, Any],
        eos_token_ids: Sequence[int],
        vocab_size: int,
        chat_template: str | None,
        defaults: SamplingOptions,
        model_limit: int = 0,
        model_type: str = "",
        now: Callable[[], datetime] = datetime.now,
        trusted: bool = False,
    ) -> None:
        """`tokenizer` is this one's own from now on: it may get another post-processor. `config` is
        tokenizer_config.json. `trusted`: whatever its expressions may cost. ConfigError: unsupported decoder, broken
        template, unknown specials, expressions that may take very long."""
        self._tokenizer = tokenizer
        self.template = chat_template or ""
        """Source of the chat template."""
        self.model_limit = model_limit
        """Tokens of prompt and answer that the model is made for; 0: config.json does not say."""
        special = {name: text for name in _SPECIAL_NAMES if (text := token_text(config.get(name))) is not None}
        plain = tokenizer.to_str()
        set_ends(tokenizer, config, special, model_type)
        source = tokenizer.to_str()
        raw = json.loads(source)
        if not trusted and not is_steady(raw):
            shown = " and ".join(map(repr, expressions(raw)))[:_SHOWN]
            raise ConfigError(
                f"tokenizer.json: {shown or 'normalizer'}: such expressions, or a normalizer that makes texts longer, "
                "may take very long over a short text, and whoever sends one would hold up all others; two repetitions "
                "may stand side by side with nothing behind them, none within another, and few may be tried again from "
                "each letter on, as in those of most tokenizers. Where only those may send requests whom you trust: "
                "--trust-tokenizer on"
            )
        added = tokenizer.get_added_tokens_decoder()
        self._control_ids = {t.content: i for i, t in added.items()}
        self._special = {t.content: i for i, t in added.items() if t.special}
        self._decoder = raw.get("decoder")
        self.pieces = Pieces(tokenizer, self._decoder, frozenset(self._special.values()))
        self._shown: dict[frozenset[str], Pieces] = {}
        self._added = frozenset(t.content for t in added.values())
        self.eos_token_ids = tuple(eos_token_ids)
        """Ids that end a generation."""
        self.vocab_size = vocab_size
        """Ids a prompt may use are below this."""
        self.defaults = defaults
        self._words = Words(self._batch) if cuts_at_words(raw) else None
        self._runs = Runs(raw) if self._words is None else None
        self._cuts = self._words is not None and may_cut(raw.get("added_tokens") or ())
        self._bound = token_bound(raw)
        self._growth = growth(raw)
        self._num_special = tokenizer.num_special_tokens_to_add(False)
        self._around = self._specials()
        self._template = ChatTemplate(chat_template, special, now) if chat_template is not None else None
        normalise = None if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str
        self._letters = Letters(raw, normalise)
        self._control = ControlTokens(tokenizer.to_str, raw.get("added_tokens") or (), chat_template or "", normalise)
        self.long_texts = LongTexts((lambda: tokenizer, self._control.copy))
        bos = special.get("bos_token")
        about = f"{plain}\0{config.get('add_bos_token')}\0{tokenizer.token_to_id(bos) if bos is not None else None}"
        if source != plain:
            about += f"\0{json.dumps(raw['post_processor'])}"
        self.digest = hashlib.sha256(about.encode("utf-8", "surrogatepass")).hexdigest()
        """Equal for tokenizers that make the same ids of any text."""

    @staticmethod
    def load(path: str | Path, *, trusted: bool = False, now: Callable[[], datetime] = datetime.now) -> Tokenizer:
        """Read a Hugging Face model directory. ConfigError names the file and what is wrong with it."""
        files = read_model_files(path)
        return Tokenizer(
            files.tokenizer,
            config=files.config,
            eos_token_ids=files.eos_token_ids,
            vocab_size=files.vocab_size,
            chat_template=files.chat_template,
            defaults=files.defaults,
            model_limit=files.model_limit,
            model_type=files.model_type,
            now=now,
            trusted=trusted,
        )

    def prepare(self) -> None:
        """What a server does before it serves: else its first conversation of some kind would hold up all others."""
        if self._template is not None:
            self._control.prepare()
        self.long_texts.start()

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Ids of a completion prompt, with the tokens before and after it that the model wants.

        Raises TooManyTokens when there are more than `most`, as soon as that is sure: often without tokenising. Where
        nothing cuts a long text, as `LongTexts.encode`.
        """
        return self._ids(text, special=True, most=most)

    def encode_end(self, text: str, count: int) -> list[int]:
        """The last `count` ids of `encode`. What is before them is not tokenised where the text can be cut. Raises as
        `LongTexts.encode`."""
        return self._end(text, count, special=True) if len(text) > _PART else last(self.encode(text), count)

    @cached_property
    def _ints(self) -> tuple[int, ...]:
        return tuple(range(max(self.vocab_size, 1 + max(self._control_ids.values(), default=0))))

    def compact(self, ids: Sequence[int]) -> tuple[int, ...]:
        """`ids` of the vocabulary, made of numbers that all prompts share: a token takes 8 bytes, and 36 otherwise."""
        try:
            return tuple(map(self._ints.__getitem__, ids))
        except IndexError:  # a vocabulary larger than its model's
            return tuple(ids)

    def surely_fits(self, text: str, most: int, *, special: bool) -> bool:
        """Whether `text` has 1 to `most` ids for certain, without tokenising it. `special`: by `encode`, else by
        `encode_alone`."""
        if self._growth is None or self._bound is None:
            return False
        size = len(text) if text.isascii() else self._growth * len(text.encode())
        if special:
            size += self._num_special + 1
        return size <= most and (self._bound.least(text) if self._bound.dropped else len(text)) > 0

    def control_id(self, text: str) -> int | None:
        """The id of a token that is added to the vocabulary as a whole; None: the text is no such token."""
        return self._control_ids.get(text)

    def encode_alone(self, text: str, most: int | None = None) -> list[int]:
        """Ids of a text without special tokens around it. Raises as `encode`."""
        return self._ids(text, special=False, most=most)

    def chat(
        self,
        conversation: Conversation,
        most: int | None = None,
        *,
        briefly: bool = False,
        as_text: int = 0,
        end: int = 0,
    ) -> ChatPrompt:
        """A conversation as a prompt: rendered, its special tokens by the template, and tokenised (ADR 27); where it
        surely has no more than `as_text` tokens, and none of its text is a control token by mistake, left as text.
        `end`: the last so many ids alone, as of `encode_end`; 0: all.

        Raises InvalidRequest, TooManyTokens as `encode` does, and where `briefly` is asked for, NeedsThread.
        """
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template (tokenizer_config.json or chat_template.jinja); use /v1/completions",
                param="messages",
            )
        guarded = not conversation.allow_control_tokens and self._has_control(conversation)
        if guarded and briefly:
            raise NeedsThread
        texts = [conversation.messages, conversation.tools, conversation.kwargs]
        marks = Marks(self._control.characters(texts) if guarded else 0)
        shown = self._marked(conversation, marks) if guarded else conversation
        if conversation.continue_final_message:
            shown = _with_cut(shown, marks.cut)
        try:
            if briefly:
                text = self._template.render(shown, steps=SOME_STEPS, made=SOME_MADE)
            else:
                text = self._template.render(shown)
        except TooCostly:
            if briefly:
                raise NeedsThread from None
            raise
        if briefly and (len(text) > SOME_TEXT or self._letters(text) > _HERE):
            raise NeedsThread  # a template may make much of little, which would wait for another process
        if conversation.continue_final_message:
            text, found, _ = text.rpartition(marks.cut)
            if not found:
                raise InvalidRequest(
                    "continue_final_message: the model's chat template does not show the last message",
                    param="continue_final_message",
                )
        if not guarded:
            if as_text and self.surely_fits(text, as_text, special=False):
                return ChatPrompt(text, None)
            if end and len(text) > _PART:
                return ChatPrompt(text, self._end(text, end, special=False))
            return ChatPrompt(text, self._ids(text, special=False, most=most)[-end:])
        plain = marks.without(text)
        self._check_bound(plain, most)
        named = self._control.named(text, marks)
        ids: list[int] = []
        for part in cut(named, _PART) if self._cuts else (named,):  # a secret name is a word
            ids += self._at_once(part, _room(most, ids), copy=True)
        return ChatPrompt(plain, _at_most(ids, most)[-end:])

    def _has_control(self, conversation: Conversation) -> bool:
        found = self._control.found_in
        return any(
            found(value, own=message["role"] == "assistant")
            for message in conversation.messages
            for name, value in message.items()
            if name != "role"
        ) or found([conversation.tools, conversation.kwargs])

    def _marked(self, conversation: Conversation, marks: Marks) -> Conversation:
        marked = self._control.marked
        messages = [
            {
                name: value if name == "role" else marked(value, marks, own=message["role"] == "assistant")
                for name, value in message.items()
            }
            for message in conversation.messages
        ]
        return replace(
            conversation,
            messages=messages,
            tools=marked(conversation.tools, marks),
            kwargs=marked(conversation.kwargs, marks),
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""
        return self.pieces.join(token_ids)

    def pieces_with(self, special: Iterable[str] | None) -> Pieces:
        """Pieces in which these special tokens are text; None: all of them."""
        if special == ():
            return self.pieces
        names = frozenset(self._special if special is None else self._special.keys() & set(special))
        if not names:
            return self.pieces
        if names not in self._shown:
            hidden = frozenset(i for text, i in self._special.items() if text not in names)
            self._shown[names] = Pieces(self._tokenizer, self._decoder, hidden)
        return self._shown[names]

    @property
    def thinks(self) -> bool:
        """Whether the model writes its reasoning between <think> and </think>."""
        return "</think>" in self.template or "</think>" in self._added

    def knows(self, variable: str) -> bool:
        """Whether the chat template looks at a variable."""
        return re.search(rf"\b{re.escape(variable)}\b", self.template) is not None

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """What the vocabulary calls them; "" for ids that it does not have."""
        return [self._tokenizer.id_to_token(i) or "" for i in token_ids]

    def _ids(self, text: str, *, special: bool, most: int | None) -> list[int]:
        self._check_bound(text, most)
        return _at_most(self._encoded(text, special=special, most=most), most)

    def _check_bound(self, text: str, most: int | None) -> None:
        # No character has more than 4 bytes: most prompts are too short to be looked at.
        bound = self._bound if most is not None and 4 * len(text) > most else None
        if most is not None and bound is not None and (surely := bound.least(text)) > most:
            raise TooManyTokens(f"{surely} tokens or more")

    def _specials(self) -> tuple[list[int], list[int]] | None:
        """Ids that the post-processor adds before and after a text; None: that is not certain, or of no use."""
        if not self._num_special:
            return [], []
        if self._words is None:
            return None
        whole, bare, added = (
            self._tokenizer.encode(text, add_special_tokens=special).ids
            for text, special in (("a", True), ("a", False), ("", True))
        )
        if not bare or len(added) != self._num_special or not set(bare).isdisjoint(added):
            return None
        at = whole.index(bare[0]) if bare[0] in whole else 0
        before, after = whole[:at], whole[at + len(bare) :]
        return (before, after) if [*before, *bare, *after] == whole and [*before, *after] == added else None

    def _end(self, text: str, count: int, *, special: bool) -> list[int]:
        """The last `count` ids of a long text, or all where it has fewer."""
        around = self._around if special else ([], [])
        if self._words is None or not self._cuts or around is None:
            return last(self._at_once(text, special=special, end=count), count)
        before, after = around
        found = [after]
        left = count - len(after)
        for part in reversed(list(cut(text, _PART))):
            found.append(self._word_ids(part, end=max(0, left)))
            left -= len(found[-1])
            if left <= 0:
                break
        else:
            found.append(before)
        return last([one for ids in reversed(found) for one in ids], count)

    def _encoded(self, text: str, *, special: bool, most: int | None) -> list[int]:
        around = self._around if special else ([], [])
        if self._words is None or around is None:
            return self._at_once(text, most, special=special)
        before, after = around
        found = list(before)
        for part in cut(text, _PART) if self._cuts else (text,):
            found += self._word_ids(part, _room(most, found))
        return found + after

    def _word_ids(self, text: str, most: int | None = None, end: int = -1) -> list[int]:
        assert self._words is not None
        if self._is_short(text):
            go_on()
            return self._words.encode(text)
        return self._at_once(text, most, end=end)

    def _at_once(
        self,
        text: str,
        most: int | None = None,
        *,
        special: bool = False,
        end: int = -1,
        copy: bool = False,
    ) -> list[int]:
        """Ids of a text that is tokenised as a whole. TooManyTokens: more than `most`. `end`: only the last so many
        need be there. `copy`: by that which knows control tokens by other names."""
        go_on()
        if self._is_short(text):
            tokenizer = self._control.copy() if copy else self._tokenizer
            # Unlike `encode`, the batch form lets other threads run.
            ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
            return ids
        count, found = self.long_texts.encode(text, by=int(copy), special=special, most=most, last=end)
        if most is not None and count > most:
            raise TooManyTokens(f"{count} tokens or more")
        return list(self.compact(found))

    def _is_short(self, text: str) -> bool:
        """Whether tokenising it at once takes no more than AT_ONCE, and no expression long."""
        if len(text) <= _SOME:
            return True
        if len(text) > _HERE or self._letters(text) > _HERE:
            return False
        return self._runs is None or not self._runs.are_slow(text)

    def _batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def last(ids: Sequence[int], count: int) -> list[int]:
    """The last `count` of them."""
    return list(ids[max(0, len(ids) - count) :])


def _room(most: int | None, found: Sequence[int]) -> int | None:
    """How many more there may be. TooManyTokens: those that were found are too many."""
    if most is not None and len(found) > most:
        raise TooManyTokens(f"{len(found)} tokens or more")
    return None if most is None else most - len(found)


def _at_most(ids: list[int], most: int | None) -> list[int]:
    if most is not None and len(ids) > most:
        raise TooManyTokens(f"{len(ids)} tokens")
    return ids


def _with_cut(conversation: Conversation, cut: str) -> Conversation:
    """The last message's text ends with `cut`, after which a continued prompt has nothing."""
    *before, last = conversation.messages
    return replace(conversation, messages=[*before, {**last, "content": last["content"] + cut}])

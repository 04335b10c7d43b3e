"""Bodies that are answered as chats: what is wrong with one is told in the names that its client knows."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from ..errors import InvalidRequest

Note = Callable[[str, str], object]
"""Is told that a parameter of the chat, and what is in it, comes from another one of the body: the paths of both."""
_M = TypeVar("_M")
_BEGIN = re.compile(r"(^|; )([a-z_]+(?:\[\d+\]|\.\w+)*)(?=:)")
"""Of what an error says of one parameter."""


class AsChat(Protocol):
    """From a body to that of a chat. InvalidRequest names parameters of the former."""

    def __call__(self, data: Mapping[str, Any], note: Note) -> dict[str, Any]: ...


class Names:
    """What a client calls parameters of the chat that its body was made."""

    def __init__(self, within: str = "") -> None:
        """`within`: path in the chat; of lists, which may be long, only what is in the same item is kept."""
        self._within = within
        self._sent: dict[str, str] = {}

    def note(self, chat: str, sent: str) -> None:
        """`sent` of the body has become `chat`."""
        if "[" not in chat or self._within.startswith(chat[: chat.index("]") + 1]):
            self._sent[chat] = sent

    def sent(self, chat: str) -> str:
        """The path in the body of one in the chat: what comes from nowhere else is called alike."""
        head = chat
        while head and head not in self._sent:
            head = head[: max(head.rfind("."), head.rfind("["), 0)]
        return self._sent[head] + chat[len(head) :] if head else chat

    def told(self, error: InvalidRequest) -> InvalidRequest:
        """A copy of an error, in the client's names."""
        found = copy.copy(error)
        found.param = None if error.param is None else self.sent(error.param)
        found.message = _BEGIN.sub(lambda m: m[1] + self.sent(m[2]), error.message)
        found.args = (found.message,)
        return found


def made_as_chat(as_chat: AsChat, data: Mapping[str, Any], make: Callable[[dict[str, Any], Names], _M]) -> _M:
    """What `make` makes of a body as a chat. Raises as both; InvalidRequest in the client's names."""
    names = Names()
    chat = as_chat(data, names.note)
    try:
        return make(chat, names)
    except InvalidRequest as e:
        error = copy.copy(e)  # the frames in its traceback hold the conversation
    del chat
    if "[" in (error.param or ""):
        # To note of each message where it comes from would take as much memory as they do.
        names = Names(error.param or "")
        as_chat(data, names.note)
    raise names.told(error)


def move(given: dict[str, Any], sent: str, chat: str, note: Note) -> None:
    """Call a parameter as chats do. InvalidRequest: both names are given."""
    if sent in given:
        only(given, sent, chat)
        given[chat] = given.pop(sent)
        note(chat, sent)


def only(given: Mapping[str, Any], sent: str, *others: str) -> None:
    """InvalidRequest: another name of what is `sent` is given as well."""
    for other in others:
        if other in given:
            raise InvalidRequest(f"{other}: not beside {sent}, which says the same; give one of the two", param=other)

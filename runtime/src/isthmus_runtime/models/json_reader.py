"""Takes typed values out of a JSON object, collecting every problem, and knows which keys nobody asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import WeightsError

_HARMLESS_PREFIXES = ("_", "transformers")
_MOST, _MOST_NUMBER = 2**31 - 1, 1e18
"""Of sizes and of other numbers: what is made of them overflows nothing."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MOST_NUMBER


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


class JsonReader:
    """One JSON object, read key by key. `source` names it in errors."""

    def __init__(self, values: Mapping[str, Any], source: str, *, problems: list[str] | None = None) -> None:
        """`problems`: where to add those that are found."""
        self._values = values
        self._source = source
        self._read: set[str] = set()
        self.problems: list[str] = [] if problems is None else problems

    def get(self, key: str) -> Any:
        """The value as it is, or None."""
        self._read.add(key)
        return self._values.get(key)

    def names(self) -> tuple[str, ...]:
        """The keys that are set."""
        return tuple(self._values)

    def problem(self, key: str, text: str) -> None:
        """Add a problem with `key`, once."""
        problem = f"{self._source}: {key} {text}"
        if problem not in self.problems:
            self.problems.append(problem)

    def integer(self, key: str, default: int | None = None, most: int = _MOST) -> int:
        """A whole number from 1 to `most`."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            self.problem(key, f"is {_shown(value)}, expected a whole number of at least 1, and at most {most}")
            return 1
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """A whole number of at least 1, or None where the file says null; `default` where it says nothing."""
        if self.get(key) is None:
            return None if key in self._values else default
        return self.integer(key)

    def count(self, key: str, default: int) -> int:
        """A whole number of at least 0; null is 0."""
        if key in self._values and not self.get(key):
            return 0
        return self.integer(key, default) if default else self.optional_integer(key) or 0

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not _is_number(value):
            self.problem(key, f"is {_shown(value)}, expected a number above 0, and at most {_MOST_NUMBER:g}")
            return 1.0
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(key, f"is {value!r}, expected true or false")
            return default
        return value

    def text(self, key: str, default: str) -> str:
        """A text."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.problem(key, f"is {value!r}, expected a text")
            return default
        return value

    def inner(self, key: str) -> JsonReader:
        """The object under `key`, empty where there is none. Whoever reads it calls `refuse_unread` in the end."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            self.problem(key, f"is {value!r}, expected an object")
            value = {}
        return JsonReader(value, f"{self._source}: {key}", problems=self.problems)

    def only(self, key: str, *known: Any) -> None:
        """Refuse every value of `key` but `known` and null."""
        value = self.get(key)
        if value is not None and value not in known:
            self.problem(key, f"{value!r} is not supported; known: {', '.join(map(str, known)) or 'null'}")

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """`count` numbers above 0."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) != count or not all(map(_is_number, value)):
            found = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
            self.problem(key, f"is {found}, expected a list of {count} numbers above 0")
            return (1.0,) * count
        return tuple(float(n) for n in value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """A number above 0, or None where the file says null; `default` where it says nothing."""
        if self.get(key) is None:
            return None if key in self._values else default
        return self.number(key)

    def assume(self, key: str, value: Any) -> None:
        """Give `key` this value where the file does not have it at all."""
        self._values = {key: value, **self._values}

    def refuse_unread(self, owner: str) -> None:
        """A problem for each key that is set and that nobody asked for; `owner` is what might have had it."""
        for key, value in self._values.items():
            # Null, false and empty mean "off" for every key there is.
            if key not in self._read and value and not key.startswith(_HARMLESS_PREFIXES):
                self.problem(
                    key,
                    f"is {value!r}: not a key that {owner} is known to have, so it may change what the model "
                    "computes. Remove it if it does not",
                )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a WeightsError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path} is missing; a model directory holds config.json and *.safetensors") from None
    except (OSError, ValueError) as e:
        raise WeightsError(f"{path} cannot be read as JSON: {e}") from e
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value

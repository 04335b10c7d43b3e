"""Texts of flags to values, with every problem named instead of the first alone."""

from __future__ import annotations

import argparse
from urllib.parse import urlsplit

from .quantities import parse_duration, parse_quantity

_MAX_DURATION_S = 366 * 86400.0
"""The platform's timers end at some centuries; more than a year is not meant."""


class FlagReader:
    """Converts flag texts, collecting every problem instead of stopping at the first."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.problems: list[str] = []

    def text(self, name: str) -> str:
        return str(getattr(self._args, name))

    def _flag(self, name: str) -> str:
        return "--" + name.replace("_", "-")

    def integer(self, name: str, low: int, high: int = 2**63) -> int:
        text = self.text(name)
        limit = f"{low} or more" if high == 2**63 else f"{low} to {high}"
        try:
            value = int(text)
        except ValueError:
            self.problems.append(f"{self._flag(name)} {text!r} is not a whole number; allowed: {limit}")
            return low
        if not low <= value <= high:
            self.problems.append(f"{self._flag(name)} {value} is out of range; allowed: {limit}")
        return value

    def fraction(self, name: str) -> float:
        text = self.text(name)
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value <= 1:
            self.problems.append(f"{self._flag(name)} {text!r} is not a fraction; allowed: above 0 up to 1")
            return 0.5
        return value

    def endpoint(self, name: str) -> str:
        """A collector's URL; OTLP's usual path where it names none."""
        text = self.text(name)
        if not text:
            return ""
        try:
            parts = urlsplit(text)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            good = False
        if not good or parts.username or parts.query or parts.fragment:
            self.problems.append(f"{self._flag(name)} {text!r} is no address of a collector; write http://HOST:PORT")
            return ""
        return text if parts.path.strip("/") else text.rstrip("/") + "/v1/traces"

    def duration(self, name: str) -> float:
        try:
            value = parse_duration(self.text(name))
        except ValueError as e:
            self.problems.append(f"{self._flag(name)}: {e}")
            return 1.0
        if not 0 < value <= _MAX_DURATION_S:
            self.problems.append(
                f"{self._flag(name)} {self.text(name)!r} is out of range; allowed: above 0 up to {_MAX_DURATION_S:g} s"
            )
        return value

    def size(self, name: str) -> int:
        try:
            return parse_quantity(self.text(name))
        except ValueError as e:
            self.problems.append(f"{self._flag(name)}: {e}")
            return 1

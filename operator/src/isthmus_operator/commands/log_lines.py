"""A record of the log is a line of its own: what users write is in many of them, and may read like another record."""

from __future__ import annotations

import logging

from ..errors import one_line, shortened

_MOST = 8192
"""Characters of a message. Kubelets keep some megabytes of a log."""


class OneLine(logging.Formatter):
    """Messages in one line, and tracebacks set in, so that no line of them begins like a record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Overrides `logging`'s."""
        record.message = one_line(shortened(record.message, _MOST))
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        """Overrides `logging`'s."""
        lines = super().formatException(ei).splitlines()  # type: ignore[arg-type]
        return "\n".join(f"    {one_line(shortened(line))}" for line in lines)

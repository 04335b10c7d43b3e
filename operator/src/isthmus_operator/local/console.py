"""What the terminal shows: log lines with the pod's name in front, and messages of `isthmus up` itself."""

from __future__ import annotations

from typing import TextIO

_COLOURS = (36, 33, 32, 35, 34, 31)


class Console:
    """Writes whole lines, so that pods never mix within one."""

    def __init__(self, out: TextIO, *, quiet: bool) -> None:
        self._out = out
        self._quiet = quiet
        self._colours: dict[str, int] = {}
        self._tty = out.isatty()
        self._encoding = out.encoding or "utf-8"
        self._gone = False

    def say(self, text: str) -> None:
        """A message of ours."""
        self._write(text)

    def log(self, source: str, line: str) -> None:
        """One line a container wrote. `quiet` leaves it to the log file."""
        if self._quiet:
            return
        prefix = f"{source:<10} | "
        if self._tty:
            colour = self._colours.setdefault(source, _COLOURS[len(self._colours) % len(_COLOURS)])
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        self._write(prefix + line)

    def _write(self, text: str) -> None:
        if self._gone:
            return
        # What a pod logs is to end no terminal that cannot show it.
        text = text.encode(self._encoding, "backslashreplace").decode(self._encoding)
        try:
            self._out.write(text + "\n")
            self._out.flush()
        except OSError:
            # The reader left (a closed terminal, `| head`). The pods go on; their log files have everything.
            self._gone = True

"""Runs a program to its end and turns its failure into an error that says what it said."""

import subprocess
from collections.abc import Sequence


class CommandError(RuntimeError):
    """A program ended with a status other than 0, or not in time; the message holds its last words."""


def run(command: Sequence[str], *, label: str = "", text: str | None = None, timeout: float = 120.0) -> str:
    """Run `command` with `text` on its standard input and return what it printed; raises CommandError.

    `label` stands for the command in the message, where the command itself would say less.
    """
    shown = label or " ".join(command)
    try:
        done = subprocess.run(
            command,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{shown}: not done after {timeout:.0f} s") from error
    if done.returncode != 0:
        raise CommandError(f"{shown}: status {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout

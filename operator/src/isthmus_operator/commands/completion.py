"""Completion, made from the argument parser, so that it knows every command and flag.

`script` is for shells and the command `isthmus`. For `kubectl isthmus`, kubectl's own completion runs the program
`kubectl_complete-isthmus` with the words of the command line, and reads what may stand in place of the last one.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence

from .parser import build_parser

ANYTHING, NO_FILES = 0, 4
"""What kubectl's shells do beside the words they are given: complete names of files, or nothing."""


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script for one of the parser's SHELLS, to be sourced."""
    commands = _commands(parser)
    if shell == "fish":
        lines = [f"complete -c isthmus -n __fish_use_subcommand -a {name}" for name in commands]
        for name, flags in commands.items():
            lines += [f"complete -c isthmus -n '__fish_seen_subcommand_from {name}' -l {flag[2:]}" for flag in flags]
        return "\n".join(lines)
    cases = "\n".join(f'    {name}) words="{" ".join(flags)}" ;;' for name, flags in commands.items())
    head = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return f"""{head}_isthmus() {{
  local words="" word="${{COMP_WORDS[COMP_CWORD]}}"
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(commands)}"; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _isthmus isthmus"""


def candidates(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], int]:
    """What may stand in place of the last word, and ANYTHING or NO_FILES."""
    *given, last = words or [""]
    action = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    command = action.choices[given[0]] if given and given[0] in action.choices else None
    if command is None:
        return ([], NO_FILES) if given else (_beginning(last, [*action.choices, "--help"]), NO_FILES)
    flags = {flag: one for one in command._actions for flag in one.option_strings}
    name, equals, value = last.partition("=")
    if equals and name in flags:
        return _values(flags[name], value, f"{name}=")
    if given[-1] in flags and flags[given[-1]].nargs != 0:
        return _values(flags[given[-1]], last)
    if last.startswith("-"):
        return _beginning(last, [flag for flag in flags if flag.startswith("--")]), NO_FILES
    # Words that are neither flags nor their values, the command's own name not counted.
    known = sum(
        not word.startswith("-") and not (before in flags and flags[before].nargs != 0)
        for before, word in itertools.pairwise(given)
    )
    places = [one for one in command._actions if not one.option_strings]
    return _values(places[known], last) if known < len(places) else ([], NO_FILES)


def _values(action: argparse.Action, word: str, before: str = "") -> tuple[list[str], int]:
    if action.choices is not None:
        return [before + found for found in _beginning(word, [str(one) for one in action.choices])], NO_FILES
    return [], NO_FILES if action.metavar == "NAME" else ANYTHING


def _beginning(word: str, words: Sequence[str]) -> list[str]:
    return [one for one in words if one.startswith(word)]


def kubectl() -> int:
    """Entry point of `kubectl_complete-isthmus`."""
    words, more = candidates(sys.argv[1:], build_parser())
    sys.stdout.write("".join(f"{word}\n" for word in words) + f":{more}\n")
    return 0


def _commands(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {
        name: [flag for action in command._actions for flag in action.option_strings if flag.startswith("--")]
        for action in actions
        for name, command in action.choices.items()
    }

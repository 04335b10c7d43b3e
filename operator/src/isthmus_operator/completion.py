"""Completion scripts, made from the argument parser, so that they know every command and flag."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script for one of SHELLS, to be sourced."""
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


def _commands(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {
        name: [flag for action in command._actions for flag in action.option_strings if flag.startswith("--")]
        for action in actions
        for name, command in action.choices.items()
    }

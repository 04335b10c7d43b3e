"""Flags and settings of low-rank adapters (LoRA), as `config.py` and `serve_flags.py` have those of the rest."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import dataclass

from .quantities import parse_quantity

LORA_RANKS = (8, 16, 32, 64, 128, 256)
"""What --max-lora-rank may be: the room of every slot."""
MEMORY_BYTES = 4 << 30
"""Of --lora-memory."""
_SLOTS = 4
_MOST_SLOTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters of an engine."""

    max_loras: int = 0
    """Slots on the device: adapters that may be computed with at once. 0: there are none, whatever is asked for."""
    max_rank: int = 16
    adapters: tuple[tuple[str, str], ...] = ()
    """(name, folder) of those to load at start."""
    file: str = ""
    """What lists those to have, and may change; empty: none."""
    folder: str = ""
    """Where those are that may be loaded at run time through the API; empty: none may."""
    memory_bytes: int = MEMORY_BYTES
    """Of the host, for all that are loaded: each takes as much as a slot, whatever its rank."""


def add_lora_flags(engine: argparse._ArgumentGroup) -> None:
    """Flags of an engine."""
    engine.add_argument("--lora", action="append", default=[], metavar="NAME=FOLDER", help="an adapter; repeatable")
    engine.add_argument("--lora-file", default="", help="JSON list of {name, path} that adapters follow as it changes")
    engine.add_argument("--max-loras", default="auto", help="adapters on the device at once; auto: 4 if there are any")
    engine.add_argument("--max-lora-rank", default="16", choices=[str(rank) for rank in LORA_RANKS])
    engine.add_argument("--lora-memory", default="4Gi", help="host memory for all adapters that are loaded, in bytes")
    engine.add_argument("--lora-dir", default="", help="folder of adapters that the API may load and unload; none: off")


def add_router_lora_flags(router: argparse._ArgumentGroup) -> None:
    """Flags of a router."""
    router.add_argument(
        "--lora-updates",
        default="off",
        choices=["on", "off"],
        help="load and unload adapters on all engines by the API",
    )


def read_lora(args: argparse.Namespace, taken: Collection[str]) -> tuple[LoraConfig, list[str]]:
    """The settings, and what is wrong with them. `taken`: names of the model."""
    problems: list[str] = []
    adapters: list[tuple[str, str]] = []
    for text in args.lora:
        name, _, folder = text.partition("=")
        if not name or not folder:
            problems.append(f"--lora {text!r} is not NAME=FOLDER")
        elif name in taken or name in dict(adapters):
            problems.append(f"--lora {text!r}: the name {name!r} is taken; give each adapter one of its own")
        adapters.append((name, folder))
    wanted = bool(adapters or args.lora_dir or args.lora_file)
    most = _SLOTS if wanted else 0
    if args.max_loras != "auto":
        if args.max_loras.isdecimal() and int(args.max_loras) <= _MOST_SLOTS:
            most = int(args.max_loras)
        else:
            problems.append(f"--max-loras {args.max_loras!r} is out of range; allowed: auto, or 0 to {_MOST_SLOTS}")
    if wanted and not most:
        problems.append(
            "--max-loras 0 leaves no room for adapters; give 1 or more, or none of --lora, --lora-file, --lora-dir"
        )
    memory = MEMORY_BYTES
    try:
        memory = parse_quantity(args.lora_memory)
    except ValueError as e:
        problems.append(f"--lora-memory {args.lora_memory!r}: {e}")
    config = LoraConfig(
        max_loras=most,
        max_rank=int(args.max_lora_rank),
        adapters=tuple(adapters),
        file=args.lora_file,
        folder=args.lora_dir,
        memory_bytes=memory,
    )
    return config, problems

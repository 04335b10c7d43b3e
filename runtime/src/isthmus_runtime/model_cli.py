"""`isthmus-runtime model import | fetch`: puts a model directory in place before anything serves it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import WeightsError


def build_model_parser() -> argparse.ArgumentParser:
    """Flags of `isthmus-runtime model`."""
    p = argparse.ArgumentParser(prog="isthmus-runtime model", description="Put a model directory in place.")
    commands = p.add_subparsers(dest="command", required=True)
    one = commands.add_parser("import", help="convert a GGUF file to safetensors")
    one.add_argument("file", help="GGUF file")
    one.add_argument("--out", required=True, help="directory to write; appears whole or not at all")
    two = commands.add_parser("fetch", help="download a model from the Hugging Face hub")
    two.add_argument("repo", help="hub id, owner/name")
    two.add_argument("--revision", default="main", help="branch, tag or commit")
    two.add_argument("--out", required=True, help="directory to write; appears whole or not at all")
    return p


def model_main(argv: Sequence[str]) -> int:
    """Run the command; 0, or 1 with every problem on stderr. Progress goes to stderr, too."""
    args = build_model_parser().parse_args(argv)
    try:
        if args.command == "import":
            from .models.gguf_import import import_gguf

            import_gguf(Path(args.file), Path(args.out), _progress)
        else:
            from .models.hub import fetch

            fetch(args.repo, args.revision, Path(args.out), _progress)
    except WeightsError as e:
        for problem in e.problems:
            print(f"model {args.command}: {problem}", file=sys.stderr)
        return 1
    return 0


def _progress(text: str) -> None:
    print(f"model: {text}", file=sys.stderr, flush=True)

"""`isthmus-runtime model import | fetch | verify`: puts a model directory in place before anything serves it."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import WeightsError
from ..quantities import parse_duration


def build_model_parser() -> argparse.ArgumentParser:
    """Flags of `isthmus-runtime model`."""
    p = argparse.ArgumentParser(prog="isthmus-runtime model", description="Put a model directory in place.")
    commands = p.add_subparsers(dest="command", required=True)
    one = commands.add_parser("import", help="convert a GGUF file to safetensors")
    one.add_argument("file", help="GGUF file")
    where = one.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", default="", help="directory to write; appears whole or not at all")
    own = "by the file's name and what it holds; its path goes to stdout"
    where.add_argument("--under", default="", help=f"directory in which the import gets one of its own, {own}")
    two = commands.add_parser("fetch", help="download a model; does nothing if it is already there")
    two.add_argument("source", help="hf://owner/name[@revision] or s3://bucket/prefix")
    two.add_argument("out", help="directory to write; appears whole or not at all")
    two.add_argument("--token-file", default="", help="file with an access token of the hub")
    two.add_argument("--s3-endpoint", default="", help="URL of an S3-compatible server; default: AWS")
    two.add_argument("--s3-region", default="", help="region of the bucket")
    two.add_argument("--credentials-dir", default="", help="folder with the files accessKeyId and secretAccessKey")
    own = "a name that no other downloader of this cache has, such as the pod's"
    two.add_argument("--resume-as", default="", help=f"{own}: a failed or killed try's files are kept and resumed")
    two.add_argument("--deadline", type=parse_duration, default=None, help="give up after this long, e.g. 30m")
    two.add_argument("--tokenizer-only", action="store_true", help="leave out the weights, as a router needs none")
    three = commands.add_parser("verify", help="compare every byte of a fetched model with what was downloaded")
    three.add_argument("directory", help="a folder that `model fetch` wrote")
    return p


def model_main(argv: Sequence[str]) -> int:
    """Run the command; 0, or 1 with every problem on stderr. Progress goes to stderr, too."""
    args = build_model_parser().parse_args(argv)
    try:
        if args.command == "import":
            from ..checkpoints.gguf import import_gguf, import_under

            if args.under:
                print(import_under(Path(args.file), Path(args.under), _progress))
            else:
                import_gguf(Path(args.file), Path(args.out), _progress)
        elif args.command == "verify":
            from ..checkpoints.provenance import SOURCE_FILE, verify_files

            if not verify_files(Path(args.directory), every_byte=True):
                raise WeightsError(
                    f"{args.directory} has no {SOURCE_FILE}: it was not fetched, or before files were recorded"
                )
            _progress(f"{args.directory} is what was downloaded")
        else:
            with _deadline(args.deadline, keeps=bool(args.resume_as)):
                _fetch(args)
    except WeightsError as e:
        for problem in e.problems:
            print(f"model {args.command}: {problem}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _deadline(seconds: float | None, *, keeps: bool) -> Iterator[None]:
    """End the process when the body takes longer. The clients bound each read, not a whole download, and their threads
    cannot be stopped in any other way."""
    if seconds is None:
        yield
        return

    def give_up() -> None:
        rest = "what was downloaded is kept for the next try" if keeps else "what was downloaded is left in pieces"
        print(
            f"model fetch: not finished after --deadline {seconds:.0f} s "
            f"(of an engine: its service's spec.availability.startupTimeout): raise it or look at the source; {rest}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _fetch(args: argparse.Namespace) -> None:
    out = Path(args.out)
    scheme, _, rest = args.source.partition("://")
    if scheme == "hf" and rest:
        from ..checkpoints.hub import fetch

        repo, _, revision = rest.partition("@")
        fetch(
            repo, revision or "main", out, _progress,
            token=_read(args.token_file), tokenizer_only=args.tokenizer_only, resume_as=args.resume_as,
        )  # fmt: skip
    elif scheme == "s3" and "/" in rest:
        from ..checkpoints.s3 import S3Access, fetch_s3, read_credentials

        access = S3Access(endpoint=args.s3_endpoint, region=args.s3_region)
        if args.credentials_dir:
            access = read_credentials(Path(args.credentials_dir), endpoint=args.s3_endpoint, region=args.s3_region)
        fetch_s3(
            args.source, out, _progress, access, tokenizer_only=args.tokenizer_only, resume_as=args.resume_as
        )  # fmt: skip
    else:
        raise WeightsError(
            f"{args.source!r} is not a model source; give hf://owner/name[@revision] or s3://bucket/prefix"
        )


def _read(path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError as e:
        raise WeightsError(f"--token-file {path}: {e.strerror}") from e


def _progress(text: str) -> None:
    print(f"model: {text}", file=sys.stderr, flush=True)

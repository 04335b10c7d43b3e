"""The command line: `isthmus`, also installed as `kubectl-isthmus`.

Exit codes: 0 done, 1 something that ran has failed, 2 what the user wrote is wrong.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Sequence

from .api.crd import to_yaml
from .api.v1alpha1 import parse
from .errors import LaunchError, UserError
from .files import load
from .local.up import Options, up
from .render.names import ROUTER_PORT, Defaults
from .render.revision import service_revision
from .render.service import render


def build_parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    parser = argparse.ArgumentParser(
        prog="isthmus", description="Serve language models, disaggregated, from one resource."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def with_file(name: str, help_text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument("file", metavar="FILE", help="YAML file of one InferenceService")
        command.add_argument("--namespace", "-n", default="default", help="for a file that names none")
        return command

    run = with_file("up", "run the service on this machine, each pod as processes")
    run.add_argument("--model", default="", help="folder or hub id (owner/name) to use in place of spec.model.source")
    run.add_argument("--port", type=_port, default=ROUTER_PORT, help="port of the router on 127.0.0.1 (default 8000)")
    run.add_argument("--run-dir", default="", help="folder for logs and state.json (default: a new temporary one)")
    run.add_argument("--quiet", "-q", action="store_true", help="leave the pods' output to the log files")
    show = with_file("render", "print the manifests that the operator would apply")
    show.add_argument("--output", "-o", choices=["yaml", "json"], default="yaml")
    with_file("validate", "check a file, and say everything that is wrong with it")
    commands.add_parser("version", help="print the version")
    return parser


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; allowed: 1 to 65535")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """One command; errors are the caller's to print."""
    if arguments.command == "version":
        print(f"isthmus {importlib.metadata.version('isthmus-operator')}")
        return 0
    documents = load(arguments.file)
    if arguments.command == "up":
        options = Options(
            model=arguments.model,
            port=arguments.port,
            run_dir=arguments.run_dir,
            quiet=arguments.quiet,
            namespace=arguments.namespace,
        )
        return up(documents, options, sys.stdout)
    service = parse(documents.service, namespace=arguments.namespace)
    if arguments.command == "validate":
        print(f"{arguments.file}: valid; revision {service_revision(service)}")
        return 0
    manifests = render(service, Defaults())
    if arguments.output == "json":
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}, indent=2))
    else:
        sys.stdout.write("---\n".join(to_yaml(manifest) for manifest in manifests))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of both command names."""
    arguments = build_parser().parse_args(argv)
    try:
        return run(arguments)
    except (UserError, LaunchError) as error:
        print(f"isthmus {arguments.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except BrokenPipeError:
        # `isthmus render FILE | head`: the reader has seen enough. Python would complain again at exit.
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())

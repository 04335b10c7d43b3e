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
from .commands import completion
from .commands.parser import build_parser
from .errors import ApiError, LaunchError, UserError
from .files import load
from .local.up import Options, up
from .plan.admission import rehearse_render
from .render.names import Defaults
from .render.revision import service_revision
from .render.service import render


def run(arguments: argparse.Namespace) -> int:
    """One command; errors are the caller's to print."""
    if arguments.command == "version":
        print(f"isthmus {importlib.metadata.version('isthmus-operator')}")
        return 0
    if arguments.command == "completion":
        print(completion.script(arguments.shell, build_parser()))
        return 0
    if arguments.command == "operator":
        from .commands.run_operator import run_operator

        return run_operator(arguments)
    if arguments.command in ("status", "explain", "plan"):
        # The client of the cluster takes a second to import; the other commands need none.
        from .commands import cluster

        return cluster.run(arguments, sys.stdout)
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
    rehearse_render(service)
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
    except (UserError, LaunchError, ApiError) as error:
        print(f"isthmus {arguments.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except BrokenPipeError:
        # `isthmus render FILE | head`: the reader has seen enough. Python would complain again at exit.
        sys.stderr.close()
        return 0
    except OSError as error:
        if arguments.command == "operator":
            raise  # where it came from tells more than what a system, TLS or nobody (a timeout) says of it
        # A run folder that is a file, a full disk: the system says which, and why.
        print(f"isthmus {arguments.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""All commands and flags of `isthmus`."""

from __future__ import annotations

import argparse

from ..api.profile import Feature
from ..render.names import ROUTER_PORT, Defaults

SHELLS = ("bash", "zsh", "fish")
"""Those that `isthmus completion` writes a script for."""


def build_parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    parser = argparse.ArgumentParser(
        prog="isthmus", description="Serve language models, disaggregated, from one resource."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def with_file(name: str, help_text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument("file", metavar="FILE", help="YAML file of one InferenceService; - reads standard input")
        command.add_argument("--namespace", "-n", default="default", help="for a file without a namespace")
        return command

    run = with_file("up", "run the service on this machine, with a pod's containers as processes")
    run.add_argument("--model", default="", help="folder, GGUF file or hub id (owner/name) for spec.model.source")
    run.add_argument("--port", type=_port, default=ROUTER_PORT, help="port of the router on 127.0.0.1 (default 8000)")
    run.add_argument("--run-dir", default="", help="folder for logs and state.json (default: a new temporary one)")
    run.add_argument("--quiet", "-q", action="store_true", help="write the pods' output to the log files only")
    show = with_file("render", "print the manifests that the operator would apply")
    show.add_argument("--output", "-o", choices=["yaml", "json"], default="yaml")
    with_file("validate", "check a file and report everything that is wrong with it")
    steps = with_file("plan", "print the steps of the rollout that applying a file would cause")
    steps.add_argument(
        "--old", metavar="FILE", default="", help="file of the service as it runs now (default: ask the cluster)"
    )
    steps.set_defaults(namespace="")
    _cluster_flags(steps)
    _named(commands, "status", "print the state of a service in the cluster")
    _named(commands, "explain", "print the one cause that keeps a service from being ready")
    _operator(commands)
    shells = commands.add_parser("completion", help="print a completion script for a shell")
    shells.add_argument("shell", choices=SHELLS)
    commands.add_parser("version", help="print the version")
    return parser


def _cluster_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output", "-o", choices=["text", "json"], default="text")
    command.add_argument("--kubeconfig", default="", help="default: KUBECONFIG, or the usual file")
    command.add_argument("--context", default="", help="context of the kubeconfig")


def _named(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, help_text: str) -> None:
    command = commands.add_parser(name, help=help_text, description=help_text)
    command.add_argument("name", metavar="NAME", help="name of an InferenceService")
    command.add_argument("--namespace", "-n", default="", help="default: that of the context, or `default`")
    _cluster_flags(command)


def _operator(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("operator", help="run the operator (in a cluster, by the chart)")
    command.add_argument("--namespace-mode", choices=["cluster", "namespace"], default="cluster",
                         help="manage all namespaces, or only those of --namespace")  # fmt: skip
    command.add_argument(
        "--namespace", "-n", action="append", default=[], help="default: the operator's own; repeatable"
    )
    command.add_argument("--kubeconfig", default="", help="default: the pod's account, KUBECONFIG, or the usual file")
    command.add_argument("--lease-name", default="isthmus-operator", help="empty: work without a lease")
    command.add_argument("--engine-image", default=Defaults().engine_image, help="for specs that name none")
    command.add_argument("--router-image", default=Defaults().router_image, help="for specs that name none")
    command.add_argument(
        "--profile",
        choices=["restricted", "permissive"],
        default="restricted",
        help="what services may ask for; permissive: all that their pods can be given",
    )
    for flag, what in (
        ("--host-path", "folder of nodes below which models may be mounted, read-only"),
        ("--writable-host-path", "folder of nodes below which caches may be kept"),
        ("--gateway-namespace", "namespace of Gateways that any service's route may name"),
    ):
        command.add_argument(flag, action="append", default=[], help=f"{what}; repeatable; only with restricted")
    command.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=[one.value for one in Feature],
        help="feature that services may use; repeatable; only with restricted",
    )
    command.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    command.add_argument("--metrics-host", default="", help="address of /metrics, /readyz and /healthz; default: all")
    command.add_argument("--metrics-port", type=int, default=9090, help="0: any free port")
    command.add_argument("--health-port", type=int, default=8080, help="port of /healthz; 0 turns it off")
    command.add_argument("--webhook-port", type=int, default=0, help="0: no webhook")
    command.add_argument("--webhook-cert-dir", default="", help="folder with tls.crt and tls.key")
    command.add_argument(
        "--resync", type=float, default=60.0, help="seconds after which a service without events is checked again"
    )


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; allowed: 1 to 65535")
    return int(text)

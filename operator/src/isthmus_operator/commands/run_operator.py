"""`isthmus operator`: flags and surroundings to `handlers.run`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from ..api.profile import Feature, Profile
from ..errors import UserError
from ..render.names import Defaults
from ..settings import Identity, identity
from ..shell.handlers import run
from ..shell.leader import LeaseSettings
from ..shell.operator import OperatorOptions
from ..shell.workqueue import Pauses
from .log_lines import OneLine

NESTING = 40_000
"""The API server takes 10,000 levels of JSON; json calls itself up to three times a level. At Python's 1,000 one such
resource would end every watch, in kopf, before anybody can refuse it."""


def options_of(arguments: argparse.Namespace, who: Identity) -> OperatorOptions:
    """UserError names the flag that is missing or does not fit."""
    namespaces: tuple[str, ...] = ()
    if arguments.namespace_mode == "namespace":
        namespaces = tuple(arguments.namespace) or ((who.namespace,) if who.namespace else ())
        if not namespaces:
            raise UserError("--namespace-mode=namespace outside a cluster needs --namespace")
    elif arguments.namespace:
        raise UserError(
            "--namespace cannot be combined with --namespace-mode=cluster; remove it, or set the mode to namespace"
        )
    if arguments.webhook_port and not arguments.webhook_cert_dir:
        raise UserError("--webhook-port needs --webhook-cert-dir, a folder with tls.crt and tls.key")
    try:
        profile = Profile(
            restricted=arguments.profile == "restricted",
            host_paths=tuple(arguments.host_path),
            writable_host_paths=tuple(arguments.writable_host_path),
            gateway_namespaces=tuple(arguments.gateway_namespace),
            allow=frozenset(Feature(one) for one in arguments.allow),
        )
    except ValueError as e:
        raise UserError(f"--writable-host-path: {e}") from e
    home = who.namespace or (namespaces[0] if namespaces else "default")
    lease = LeaseSettings(namespace=home, name=arguments.lease_name, holder=who.name) if arguments.lease_name else None
    return OperatorOptions(
        namespaces=namespaces,
        kubeconfig=arguments.kubeconfig or who.kubeconfig,
        lease=lease,
        defaults=Defaults(
            engine_image=arguments.engine_image,
            router_image=arguments.router_image,
            operator_namespace=who.namespace,
        ),
        profile=profile,
        webhook_port=arguments.webhook_port,
        webhook_cert_dir=arguments.webhook_cert_dir,
        webhook_host=who.everywhere,
        metrics_host=arguments.metrics_host or who.everywhere,
        metrics_port=arguments.metrics_port,
        health_port=arguments.health_port,
        pauses=Pauses(resync=arguments.resync),
    )


def run_operator(arguments: argparse.Namespace) -> int:
    """Runs until a signal; 0 then."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=arguments.log_level.upper(), handlers=[handler], force=True)
    # kopf logs every watch and event; what the operator does with them it logs itself.
    logging.getLogger("kopf").setLevel(logging.WARNING if arguments.log_level != "debug" else logging.DEBUG)
    sys.setrecursionlimit(NESTING)
    asyncio.run(run(options_of(arguments, identity())))
    return 0

"""Compares the rights of an account with the calls it made, as the API server's audit log has them.

Pure. A right that no call needed is too much; a call that no right covers is too little (and was refused).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One verb on one resource of one API group; `resource` has its subresource, as rules do (`pods/status`)."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")


def rights(roles: Iterable[Mapping[str, Any]]) -> set[Right]:
    """What Roles and ClusterRoles grant, whatever the names they limit it to. Wildcards are not understood: refuse
    them before."""
    return {
        Right(group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule.get("apiGroups", [])
        for resource in rule.get("resources", [])
        for verb in rule["verbs"]
    }


def calls(log: Iterable[str], user: str) -> set[Right]:
    """Rights that the requests of `user` asked for. `log`: lines of an audit log in JSON, level Metadata or above.

    A server-side apply that creates asks for two rights, patch and create; the log names only the first, with code
    201 for a creation.
    """
    out: set[Right] = set()
    for line in log:
        event = json.loads(line)
        target = event.get("objectRef")
        if event["user"]["username"] != user or not target:
            continue
        resource = target["resource"] + (f"/{target['subresource']}" if target.get("subresource") else "")
        group = target.get("apiGroup", "")
        out.add(Right(group, resource, event["verb"]))
        if event["verb"] == "patch" and event.get("responseStatus", {}).get("code") == 201:
            out.add(Right(group, resource, "create"))
    return out


@dataclass(frozen=True, slots=True)
class Difference:
    """`unused`: granted and never asked for. `refused`: asked for and not granted. Both empty: minimal."""

    unused: tuple[Right, ...]
    refused: tuple[Right, ...]

    def __str__(self) -> str:
        lines = [f"granted, never used: {right}" for right in self.unused]
        return "\n".join(lines + [f"used, not granted: {right}" for right in self.refused]) or "minimal"


def compare(granted: set[Right], asked: set[Right], reasons: Mapping[Right, str]) -> Difference:
    """`reasons`: rights that a test cannot bring about, each with why it is granted. A reason for a right that is used
    or not granted is itself a mistake, and raises ValueError."""
    stale = sorted(right for right in reasons if right in asked or right not in granted)
    if stale:
        raise ValueError(f"no reason is needed for: {', '.join(map(str, stale))}; remove it")
    return Difference(tuple(sorted(granted - asked - set(reasons))), tuple(sorted(asked - granted)))

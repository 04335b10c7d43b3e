"""What the operator asked of the API server, as the server's audit log has it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

READS = ("get", "list", "watch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answered request. `at`: when it was answered, seconds since the epoch."""

    at: float
    verb: str
    resource: str
    subresource: str
    namespace: str
    name: str
    code: int

    @property
    def writes(self) -> bool:
        """Whether it could change an object other than the operator's own lease, which is renewed every 3 s."""
        return self.verb not in READS and self.resource != "leases"

    @property
    def creates(self) -> bool:
        """Whether it has made a child: an Event belongs to no service's children."""
        return self.writes and self.code == 201 and self.resource != "events"

    @property
    def service(self) -> tuple[str, str]:
        """The service whose child or status it is about; names of the bench's services have no dash."""
        return self.namespace, self.name.partition("-")[0]


def parse(line: str, user: str) -> Request | None:
    """None for a stage other than the last, and for somebody else's."""
    event = json.loads(line)
    if event["stage"] != "ResponseComplete" or event["user"]["username"] != user:
        return None
    about = event.get("objectRef") or {}
    return Request(
        at=datetime.fromisoformat(event["stageTimestamp"]).timestamp(),
        verb=event["verb"],
        resource=about.get("resource", ""),
        subresource=about.get("subresource", ""),
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        code=int(event["responseStatus"]["code"]),
    )


class AuditLog:
    """Reads what has been added since the last call; the API server writes an entry before it answers."""

    def __init__(self, path: Path, user: str) -> None:
        self._path = path
        self._user = user
        self._offset = 0

    def news(self) -> list[Request]:
        """Requests answered since the last call."""
        return list(self._read())

    def _read(self) -> Iterator[Request]:
        if not self._path.exists():
            return
        with self._path.open("rb") as log:
            log.seek(self._offset)
            text = log.read()
        whole = text.rpartition(b"\n")[0]
        self._offset += len(whole) + 1 if whole else 0
        for line in whole.decode().splitlines():
            if (request := parse(line, self._user)) is not None:
                yield request


def counted(requests: Iterable[Request]) -> dict[str, int]:
    """How many of each kind: "patch deployments" -> 3."""
    names = Counter(f"{r.verb} {r.resource}{'/' + r.subresource if r.subresource else ''}" for r in requests)
    return dict(names.most_common())

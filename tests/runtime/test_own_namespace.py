"""In a pod a name without a dot is that of a Service of its own namespace, and of nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus_runtime.own_namespace import absolute, absolute_address

POD = (
    "nameserver 10.96.0.10\nsearch team-a.svc.cluster.local svc.cluster.local cluster.local corp.example\n"
    "options ndots:5\n"
)
LAPTOP = "# made by hand\nnameserver 1.1.1.1\nsearch corp.example\n"


@pytest.mark.parametrize(
    ("text", "host", "name"),
    [
        (POD, "chat-decode", "chat-decode.team-a.svc.cluster.local."),
        (POD.replace("cluster.local", "k8s.example."), "chat-decode", "chat-decode.team-a.svc.k8s.example."),
        ("search corp.example\n" + POD, "chat-decode", "chat-decode.team-a.svc.cluster.local."),
        (POD, "chat.team-b", "chat.team-b"),
        (POD, "10.0.0.7", "10.0.0.7"),
        (POD, "fd00::7", "fd00::7"),
        (POD, "localhost", "localhost"),
        (POD, "", ""),
        (LAPTOP, "chat-decode", "chat-decode"),
        ("search\n", "chat-decode", "chat-decode"),
        ("", "chat-decode", "chat-decode"),
    ],
)
def test_names_of_services_are_absolute(tmp_path: Path, text: str, host: str, name: str) -> None:
    conf = tmp_path / "resolv.conf"
    conf.write_text(text)
    assert absolute(host, conf) == name
    if host and ":" not in host:
        assert absolute_address(f"{host}:50051", conf) == f"{name}:50051"


def test_without_the_file_names_are_as_they_are(tmp_path: Path) -> None:
    assert absolute("chat-decode", tmp_path / "none") == "chat-decode"
    assert absolute_address("no-port") == "no-port"
    assert absolute_address("[fd00::7]:50051", tmp_path / "none") == "[fd00::7]:50051"

"""Clients are told apart by what one host has one of."""

from __future__ import annotations

import pytest

from isthmus_runtime.serving.clients import known_by


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1%eth0", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("", ""),
        ("unix", "unix"),
    ],
)
def test_of_an_ipv6_address_its_network_is_the_client(host: str, name: str) -> None:
    assert known_by(host) == name

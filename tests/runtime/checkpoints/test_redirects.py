"""How near an address is, and that nothing is said on a connection to one that is too near."""

import socket

import pytest
from requests import Session

from isthmus_runtime.checkpoints.redirects import Nearness, NoNearer, nearness
from isthmus_runtime.errors import WeightsError


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", Nearness.PUBLIC),
        ("2001:4860:4860::8888", Nearness.PUBLIC),
        ("10.96.0.1", Nearness.PRIVATE),
        ("100.64.0.1", Nearness.PRIVATE),
        ("224.0.0.1", Nearness.PRIVATE),
        ("fd00::1", Nearness.PRIVATE),
        ("::ffff:10.0.0.1", Nearness.PRIVATE),
        ("64:ff9b::a00:1", Nearness.PRIVATE),
        ("2002:a00:1::", Nearness.PRIVATE),
        ("127.1.2.3", Nearness.LOOPBACK),
        ("0.0.0.0", Nearness.LOOPBACK),
        ("::1", Nearness.LOOPBACK),
        ("::", Nearness.LOOPBACK),
        ("169.254.169.254", Nearness.LINK),
        ("::ffff:169.254.169.254", Nearness.LINK),
        ("64:ff9b::a9fe:a9fe", Nearness.LINK),
        ("fe80::1%eth0", Nearness.LINK),
        ("fd00:ec2::254", Nearness.LINK),
        ("100.100.100.200", Nearness.LINK),
    ],
)
def test_nearness(address: str, expected: Nearness) -> None:
    assert nearness(address) is expected


def test_a_name_is_judged_by_the_address_that_is_connected_to() -> None:
    """Looked at before, it may have another one when it counts."""
    adapter = NoNearer("hf://owner/tiny")
    adapter.check("hub", "10.0.0.1")
    adapter.check("files", "8.8.8.8")
    with socket.create_server(("127.0.0.1", 0)) as server, Session() as session:
        session.mount("http://", adapter)
        session.trust_env = False
        server.settimeout(30)
        with pytest.raises(WeightsError, match=r"to localhost at 127\.0\.0\.1, a loopback address, while"):
            session.get(f"http://localhost:{server.getsockname()[1]}/", timeout=30)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(30)
            assert connection.recv(1) == b"", "closed, and nothing was said"


def test_behind_a_proxy_addresses_in_urls_are_judged() -> None:
    """The proxy's own address, which is near as a rule, is not the hub's."""
    adapter = NoNearer("hf://owner/tiny")
    with socket.create_server(("127.0.0.1", 0)) as proxy, Session() as session:
        session.mount("http://", adapter)
        session.trust_env = False
        session.proxies = {"http": f"http://127.0.0.1:{proxy.getsockname()[1]}"}
        with pytest.raises(WeightsError, match="its own is public"):
            adapter.check("hub", "8.8.8.8")
            session.get("http://10.0.0.1/", timeout=30)

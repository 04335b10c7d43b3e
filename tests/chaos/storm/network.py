"""A network of our own: one namespace for each process, joined by a bridge in this process's namespace.

    here, br0 10.77.0.1 ---+-- eth0 10.77.0.2 router
                           +-- eth0 10.77.0.3 prefill0 ...

`run_storm.py` enters a fresh namespace first, so nothing of this is in the machine's own network. Cuts are nftables
drop rules on the victim's side, throttles are token buckets at both ends of its cable, and delays come from a small
proxy (`slow_wire.py`) that takes over connections opened meanwhile: the kernels this runs on have no `netem`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HUB = "10.77.0.1"
PROXY_PORT = 9999
_RULES = """
table ip chaos {
  set from_peers { type ipv4_addr; }
  set to_peers { type ipv4_addr; }
  chain cut_in {
    type filter hook input priority 0;
    ip saddr @from_peers drop
  }
  chain cut_out {
    type filter hook output priority 0;
    ip daddr @to_peers drop
  }
  chain reset_in {
    type filter hook input priority 1;
  }
  chain reset_out {
    type filter hook output priority 1;
  }
  chain redirect_in {
    type nat hook prerouting priority -100;
  }
}
"""
_RESET = """
add rule ip chaos reset_in iifname "eth0" meta l4proto tcp ct state established reject with tcp reset
add rule ip chaos reset_out oifname "eth0" meta l4proto tcp ct state established reject with tcp reset
"""


class Network:
    """Namespaces for `names`, with the operations that harm them. Every call blocks for some milliseconds."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.address = {name: f"10.77.0.{i + 2}" for i, name in enumerate(names)}
        self._tag = f"isthmus-chaos-{os.getpid()}"

    def up(self) -> None:
        """Make everything. The caller is in a namespace of its own."""
        _ip("link set lo up", "link add br0 type bridge", "link set br0 up", f"addr add {HUB}/24 dev br0")
        for name in self.names:
            _ip(f"netns add {self._space(name)}")
            _ip(
                f"link add v-{name} master br0 type veth peer name eth0 netns {self._space(name)}",
                f"link set v-{name} up",
            )
            lines = ("link set lo up", f"addr add {self.address[name]}/24 dev eth0", "link set eth0 up")
            _run([*self.enter(name), "ip", "-batch", "-"], "\n".join(lines) + "\n")
            self._nft(name, _RULES)
            # A reset may be out of what the kernel takes for the window; it must still find its way through `redirect`.
            _run([*self.enter(name), "sysctl", "-q", "net.netfilter.nf_conntrack_tcp_ignore_invalid_rst=1"])

    def down(self) -> None:
        """Remove the namespaces that are there."""
        for name in self.names:
            if Path("/run/netns", self._space(name)).exists():
                _run(["ip", "netns", "del", self._space(name)])

    def enter(self, name: str) -> list[str]:
        """The command prefix that starts a program in the namespace; the program keeps the pid."""
        return ["nsenter", f"--net=/run/netns/{self._space(name)}", "--"]

    def pids(self, name: str) -> list[int]:
        """Processes in the namespace."""
        return [int(word) for word in _run(["ip", "netns", "pids", self._space(name)]).split()]

    def cut(self, name: str, peers: Sequence[str], *, both_ways: bool = True) -> None:
        """Drop what goes from `name` to `peers`, and what comes from them unless `both_ways` is False."""
        there = ", ".join(self.address[peer] for peer in peers)
        lines = [f"add element ip chaos to_peers {{ {there} }}"]
        if both_ways:
            lines.append(f"add element ip chaos from_peers {{ {there} }}")
        self._nft(name, "\n".join(lines))

    def throttle(self, name: str, kbit: int) -> None:
        """Limit the cable of `name`, each way; up to 1 s of bytes wait before some are dropped."""
        bucket = f"root tbf rate {kbit}kbit burst 8kb latency 1000ms"
        _run(["tc", *f"qdisc replace dev v-{name} {bucket}".split()])
        _run([*self.enter(name), "tc", *f"qdisc replace dev eth0 {bucket}".split()])

    def start_reset(self, name: str) -> None:
        """Answer every packet of an open connection with a reset, at both ends, until `heal`."""
        self._nft(name, _RESET)

    def stop_reset(self, name: str) -> None:
        self._nft(name, "flush chain ip chaos reset_in\nflush chain ip chaos reset_out\n")

    def start_delay(self, name: str, delay_ms: int, kbytes: int) -> subprocess.Popen[bytes]:
        """Lead new connections through a proxy that holds up each piece of data. The caller ends the process."""
        script = Path(__file__).with_name("slow_wire.py")
        argv = [*self.enter(name), sys.executable, str(script), str(PROXY_PORT), str(delay_ms), str(kbytes)]
        proxy = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert proxy.stdout is not None
        proxy.stdout.readline()  # it listens
        self._nft(name, f'add rule ip chaos redirect_in iifname "eth0" meta l4proto tcp redirect to :{PROXY_PORT}\n')
        return proxy

    def heal(self, name: str) -> None:
        """Undo every harm to `name`."""
        flush = ["set ip chaos from_peers", "set ip chaos to_peers"]
        flush += [f"chain ip chaos {chain}" for chain in ("reset_in", "reset_out", "redirect_in")]
        self._nft(name, "".join(f"flush {what}\n" for what in flush))
        for argv in (["tc"], [*self.enter(name), "tc"]):
            device = f"v-{name}" if len(argv) == 1 else "eth0"
            if " tbf " in _run([*argv, "qdisc", "show", "dev", device]):
                _run([*argv, "qdisc", "del", "dev", device, "root"])

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _nft(self, name: str, text: str) -> None:
        _run([*self.enter(name), "nft", "-f", "-"], text)


def _ip(*lines: str) -> None:
    for line in lines:
        _run(["ip", *line.split()])


def _run(argv: list[str], text: str = "") -> str:
    done = subprocess.run(argv, input=text.encode(), capture_output=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.decode(errors='replace').strip()}\n{text}")
    return done.stdout.decode()

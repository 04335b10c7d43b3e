"""Who has to give way when connections or bodies are too many; and a process with few descriptors."""

import resource
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.serving.admission import BodyBudget, Connections, connections_within

NAMES = st.integers(0, 9)


@given(st.integers(1, 5), st.integers(1, 5), st.lists(st.tuples(st.sampled_from(["add", "work", "wait", "go"]), NAMES)))
def test_connections_never_exceed_their_bounds(most, of_address, steps):
    table, working = Connections(most, of_address), set()
    there = []
    for step, name in steps:
        if step == "add" and name not in there:
            leaver = table.add(name, f"a{name % 2}")
            if leaver is not None:
                assert leaver not in working, "who is answered stays"
                assert leaver in (name, *there)
            if leaver != name:
                there.append(name)
            if leaver in there and leaver != name:
                # It waits, and nobody who waits came to that earlier.
                assert leaver == next(n for n in there if n not in working)
                there.remove(leaver)
        elif step == "work" and name in there:
            table.works(name)
            working.add(name)
        elif step == "wait" and name in working:
            table.waits(name)
            working.discard(name)
            there.remove(name)
            there.append(name)
        elif step == "go":
            table.remove(name)
            there = [n for n in there if n != name]
            working.discard(name)
        assert len(table) == len(there) <= most
        assert all(sum(n % 2 == side for n in there) <= of_address for side in (0, 1))


STEPS = st.tuples(st.sampled_from(["add", "arrived", "release", "let go"]), NAMES, st.integers(0, 30))


@given(st.integers(4, 50), st.booleans(), st.lists(STEPS))
def test_bodies_never_exceed_their_budget_while_one_can_give_way(most, known, steps):
    """Nor those of one address three quarters of it, where addresses are known."""
    budget, held, arriving, share = BodyBudget(most), {}, set(), most - most // 4
    address = lambda name: f"a{name % 3}" if known else ""  # noqa: E731

    def of(side):
        return sum(size for one, size in held.items() if known and address(one) == side)

    for step, name, size in steps:
        if step == "add":
            held[name] = held.get(name, 0) + size
            arriving.add(name)
            leaver = budget.add(name, size, address(name))
            while leaver is not None:
                over = arriving if sum(held.values()) > most else {n for n in arriving if of(address(n)) > share}
                assert leaver in over
                assert of(address(leaver)) == max(of(address(n)) for n in over), "of the address that has most"
                assert held[leaver] == max(held[n] for n in over if address(n) == address(leaver))
                del held[leaver]
                arriving.discard(leaver)
                leaver = budget.excess()
        elif step == "arrived":
            budget.arrived(name)
            arriving.discard(name)
        elif step == "release":
            budget.release(name)
            held.pop(name, None)
            arriving.discard(name)
        elif step == "let go":
            budget.release_part(name, size)
            if size < held.get(name, 0):
                held[name] -= size
            else:
                held.pop(name, None)
                arriving.discard(name)
        assert budget.used == sum(held.values()) == sum(budget.of(n) for n in range(10))
        assert budget.used <= most or not arriving
        assert all(of(address(n)) <= share for n in arriving)


def test_whoever_fills_the_budget_with_many_bodies_gives_way_to_who_sends_one_large_one():
    budget = BodyBudget(100)
    for name in range(14):
        assert budget.add(name, 5, "many") is None
    assert budget.add("large", 25, "one") is None
    assert budget.add("large", 10, "one") in range(14)
    assert budget.of("large") == 35 and budget.excess() is None


def test_every_connection_has_descriptors_for_its_answer():
    assert [connections_within(n) for n in (0, 64, 128, 1024)] == [8, 8, 21, 320]


SERVER = """
import asyncio
from isthmus_runtime.serving.app import add_pages, make_app
from isthmus_runtime.serving.server import run_app
app = make_app("few", bodies=())
add_pages(app)
asyncio.run(run_app(app, host="127.0.0.1", port=0, drain_timeout_s=1, on_started=lambda p: print(p, flush=True)))
"""


@pytest.mark.parametrize("count", [100])
def test_with_few_descriptors_silent_connections_keep_nobody_out(count):
    few = 96
    argv = [sys.executable, "-c", SERVER]
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))  # noqa: E731
    with subprocess.Popen(argv, stdout=subprocess.PIPE, preexec_fn=limit) as server, ExitStack() as open_:  # noqa: PLW1509
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            for _ in range(count):
                open_.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            with socket.create_connection(("127.0.0.1", port), 10) as client:
                client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert client.recv(100).startswith(b"HTTP/1.1 200")
        finally:
            server.terminate()

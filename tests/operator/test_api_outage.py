"""What the operator does while the API server does not answer, and when it does again."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, cast

import pytest
from jumping_loop import run_jumping
from processes import free_port

from isthmus_operator.errors import ApiError, UserError
from isthmus_operator.render.names import TokenIssuer
from isthmus_operator.shell import operator
from isthmus_operator.shell.client import Api
from isthmus_operator.shell.issuer import AGAIN_S
from isthmus_operator.shell.start import MOST_PAUSE_S, RIGHTS_S, require_cluster
from isthmus_operator.shell.workqueue import Key, Pauses, WorkQueue

A, B = ("ns", "a"), ("ns", "b")
KINDS = {"resources": [{"name": "inferenceservices"}, {"name": "rolescalers"}]}
NO_ANSWER = ApiError(0, "GET /x: no answer in time")
FORBIDDEN = ApiError(403, "GET /pods: HTTP 403: forbidden")


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


class Server:
    """Answers discovery and lists. script: (until when, what it says to discovery, what it says to lists)."""

    def __init__(self, *script: tuple[float, object, object]) -> None:
        self.script = script
        self.asked: list[float] = []

    def _now(self) -> tuple[float, object, object]:
        now = asyncio.get_running_loop().time()
        return next((one for one in self.script if now < one[0]), (0.0, KINDS, {"items": []}))

    async def find(self, path: str) -> Any:
        self.asked.append(asyncio.get_running_loop().time())
        said = self._now()[1]
        if isinstance(said, Exception):
            raise said
        return said

    async def get(self, path: str, **query: str) -> Any:
        said = self._now()[2]
        if isinstance(said, Exception):
            raise said
        return said


@pytest.mark.parametrize("error", [NO_ANSWER, ApiError(429, "slow down"), ApiError(500, "etcd"), ApiError(503, "soon")])
def test_an_api_server_that_does_not_answer_is_waited_for(error: ApiError) -> None:
    async def main() -> None:
        server = Server((600.0, error, None), (900.0, KINDS, error))
        await require_cluster(cast(Api, server), ("",))
        assert 900 <= asyncio.get_running_loop().time() <= 900 + MOST_PAUSE_S
        gaps = [b - a for a, b in zip(server.asked, server.asked[1:], strict=False)]
        assert gaps[0] == 1 and max(gaps) <= MOST_PAUSE_S

    run_jumping(main())


@pytest.mark.parametrize(
    ("kinds", "lists", "error"),
    [({}, {}, UserError), (None, {}, UserError), (KINDS, FORBIDDEN, ApiError), (ApiError(401, "who?"), {}, ApiError)],
)
def test_what_it_goes_on_refusing_ends_the_start_with_the_reason(
    kinds: object, lists: object, error: type[Exception]
) -> None:
    async def main() -> None:
        # Missing, then no answer for long: that does not count as time in which it was refused.
        server = Server((5.0, kinds, lists), (300.0, NO_ANSWER, None), (900.0, kinds, lists))
        with pytest.raises(error, match=r"crds/|rbac\.md|who"):
            await require_cluster(cast(Api, server), ("a",))
        assert 300 + RIGHTS_S <= asyncio.get_running_loop().time() <= 300 + RIGHTS_S + 3 * MOST_PAUSE_S

    run_jumping(main())


def test_rights_and_kinds_that_come_a_little_later_are_no_error() -> None:
    async def main() -> None:
        await require_cluster(cast(Api, Server((9.0, None, {}), (18.0, KINDS, FORBIDDEN))), ("",))

    run_jumping(main())


@pytest.mark.parametrize("which", ["look", "find_issuer"])
@pytest.mark.parametrize(("status", "told"), [(401, True), (403, True), (404, True), (410, False), (500, False)])
def test_services_are_told_of_what_may_not_be_read_and_of_no_other_trouble(
    monkeypatch: pytest.MonkeyPatch, status: int, told: bool, which: str
) -> None:
    """Lists, and the keys by which pods know each other.

    etcd without a leader answers 500, and 410 a list that took too long: neither makes a service unready."""

    async def main() -> None:
        one = operator.Operator(cast(Api, None), operator.OperatorOptions())
        unread: list[object] = []

        async def ask(*_: object, **__: object) -> None:
            unread.append(one.controller.unread)
            if len(unread) == 1:
                raise ApiError(status, "GET /pods: no")

        async def fine(*_: object, **__: object) -> None:
            """Found."""

        for name in ("look", "find_issuer"):
            monkeypatch.setattr(operator, name, ask if name == which else fine)
        await one._look()
        assert [bool(why) for why in unread] == [False, told] and not one.controller.unread

    run_jumping(main())


def test_services_hear_of_rotated_keys_and_keep_those_that_were_known_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        one = operator.Operator(cast(Api, None), operator.OperatorOptions())
        answers: list[TokenIssuer | ApiError] = [TokenIssuer(name="i", keys=keys) for keys in ("[1]", "[1]", "[1,2]")]
        answers.insert(2, ApiError(500, "GET /openid/v1/jwks: no"))
        woken: list[int] = []

        async def find(*_: object) -> TokenIssuer:
            answer = answers.pop(0)
            if isinstance(answer, ApiError):
                raise answer
            return answer

        monkeypatch.setattr(operator, "find_issuer", find)
        monkeypatch.setattr(one.cache, "services", lambda: [("ns", "svc")])
        monkeypatch.setattr(one.queue, "add", lambda key: woken.append(len(answers)))
        await one._ask()
        again = asyncio.ensure_future(one._ask_again())
        await asyncio.sleep(10 * AGAIN_S)
        assert woken == [0]
        assert one.controller.defaults.issuer == TokenIssuer(name="i", keys="[1,2]")
        assert isinstance(again.exception(), IndexError)  # the script is over

    run_jumping(main())


@pytest.mark.slow
def test_while_it_waits_it_is_alive_and_not_ready_and_ends_by_a_signal(tmp_path: Path) -> None:
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    health = free_port()
    flags = [f"--kubeconfig={tmp_path / 'kubeconfig'}", "--metrics-host=127.0.0.1", "--metrics-port=0"]
    flags.append(f"--health-port={health}")
    command = [sys.executable, "-P", "-m", "isthmus_operator", "operator", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = ""
        try:
            while "cannot start yet" not in told:
                told += process.stderr.readline()
                assert process.poll() is None, told
            port = re.search(r"metrics on port (\d+)", told)
            assert port is not None

            def ask(what: str) -> int:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{what}", timeout=30) as answer:
                        return int(answer.status)
                except urllib.error.HTTPError as error:
                    error.close()
                    return error.code

            # It opens while the API server is looked for.
            end = time.monotonic() + 30
            while not listens(health):
                assert time.monotonic() < end

            assert (ask(f"{health}/healthz"), ask(f"{port[1]}/readyz")) == (200, 503)
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(timeout=60) == 0
            assert "Traceback" not in rest
        finally:
            process.kill()


class Work:
    """What a queue does: fails as long as it is told to, and takes its time."""

    def __init__(self) -> None:
        self.fails = False
        self.takes_s = 0.0
        self.runs: list[tuple[float, Key]] = []
        self.queue = WorkQueue(self.work, failed=lambda key, error: None, pauses=Pauses(), spread=lambda: 0.0)

    async def work(self, key: Key) -> float | None:
        self.runs.append((asyncio.get_running_loop().time(), key))
        await asyncio.sleep(self.takes_s)
        if self.fails:
            raise ApiError(0, "no answer")
        return None


def test_what_was_being_worked_on_when_the_lease_was_lost_is_done_when_it_is_back() -> None:
    async def main() -> None:
        one = Work()
        one.takes_s = 5.0
        running = asyncio.create_task(one.queue.run(1))
        one.queue.add(A)
        one.queue.add(B)
        await asyncio.sleep(1.0)
        running.cancel()
        await asyncio.wait((running,))
        await asyncio.sleep(20.0)
        assert [key for _, key in one.runs] == [A]
        running = asyncio.create_task(one.queue.run(1))
        await asyncio.sleep(15.0)
        assert sorted(key for _, key in one.runs) == [A, A, B]
        running.cancel()
        await asyncio.wait((running,))

    run_jumping(main())


def test_an_edit_ends_the_pause_after_failures_and_other_changes_do_not() -> None:
    async def main() -> None:
        loop, one = asyncio.get_running_loop(), Work()
        one.fails = True
        task = asyncio.create_task(one.queue.run(2))
        one.queue.add(A)
        await asyncio.sleep(200.0)
        before, (last, _) = len(one.runs), one.runs[-1]
        await asyncio.sleep(last + 5.0 - loop.time())
        one.queue.add(A)
        await asyncio.sleep(10.0)
        assert len(one.runs) == before, "its own failed attempts cause changes too"
        edited = loop.time()
        one.queue.add(A, anew=True)
        await asyncio.sleep(10.0)
        pauses = Pauses()
        assert [at - edited for at, _ in one.runs[before:]] == pytest.approx(
            [pauses.settle + wait for wait in (0.0, 1.0, 3.0, 7.0)]
        )
        task.cancel()
        await asyncio.wait((task,))

    run_jumping(main())


def test_an_edit_in_the_middle_of_a_run_that_fails_is_tried_after_it() -> None:
    async def main() -> None:
        loop, one = asyncio.get_running_loop(), Work()
        one.fails, one.takes_s = True, 1.0
        task = asyncio.create_task(one.queue.run(2))
        one.queue.add(A)
        await asyncio.sleep(200.0)
        before, (last, _) = len(one.runs), one.runs[-1]
        one.queue.add(A, anew=True)
        await asyncio.sleep(0.5)
        assert len(one.runs) == before + 1
        one.queue.add(A, anew=True)
        await asyncio.sleep(0.7)
        assert len(one.runs) == before + 2
        assert one.runs[-1][0] == pytest.approx(one.runs[-2][0] + one.takes_s + Pauses().settle)
        assert loop.time() < last + 60
        task.cancel()
        await asyncio.wait((task,))

    run_jumping(main())

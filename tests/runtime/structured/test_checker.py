"""The process that compiles strangers' grammars: it is killed when it must be, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from isthmus_runtime.errors import InvalidRequest, Overloaded
from isthmus_runtime.request import Structure
from isthmus_runtime.structured import checker as module
from isthmus_runtime.structured.checker import Checker

GOOD = Structure("json_object")
# llguidance's own limits let this compile for minutes.
ENDLESS = Structure(
    "json_schema", json.dumps({"allOf": [{"type": "string", "pattern": f".{{0,{i}}}x"} for i in range(80)]})
)


def run(work: Callable[[Checker], Awaitable[None]], model: Path, timeout_s: float = 20.0) -> None:
    async def main() -> None:
        checker = Checker(model, compile_timeout_s=timeout_s)
        try:
            async with asyncio.timeout(120):
                await work(checker)
        finally:
            await checker.close()

    asyncio.run(main())


def pid_of(checker: Checker) -> int:
    assert checker._process is not None
    return checker._process.pid


def test_good_ones_pass_and_bad_ones_are_named(model: Path) -> None:
    async def work(checker: Checker) -> None:
        await checker.check(GOOD, "response_format")
        for _ in range(2):  # from the process, then from memory
            with pytest.raises(InvalidRequest, match=r"^structured_outputs: .*regex") as caught:
                await checker.check(Structure("regex", "(["), "structured_outputs")
            assert caught.value.param == "structured_outputs"
        await checker.check(Structure("regex", "a" * 1000), "structured_outputs")

    run(work, model)


@pytest.mark.parametrize("required", [True, 5, [["a"]]])
def test_a_schema_of_another_draft_is_named(model: Path, required: object) -> None:
    """`required: true` is of draft 3."""
    schema = {"type": "object", "properties": {"a": {}}, "required": required}

    async def work(checker: Checker) -> None:
        await checker.check(GOOD, "x")
        first = pid_of(checker)
        with pytest.raises(InvalidRequest, match="required"):
            await checker.check(Structure("json_schema", json.dumps(schema)), "x")
        assert pid_of(checker) == first

    run(work, model)


def test_what_nobody_has_foreseen_is_of_one_grammar(model: Path) -> None:
    async def work(checker: Checker) -> None:
        await checker.check(GOOD, "x")
        first = pid_of(checker)
        with pytest.raises(InvalidRequest, match=r"cannot be compiled \(KeyError"):
            await checker.check(Structure("unheard-of", ""), "x")  # type: ignore[arg-type]
        await checker.check(Structure("regex", "ab"), "x")
        assert pid_of(checker) == first

    run(work, model)


def test_an_endless_one_is_ended_and_the_next_is_answered(model: Path) -> None:
    async def work(checker: Checker) -> None:
        await checker.check(GOOD, "x")
        first = pid_of(checker)
        waiting = asyncio.gather(
            checker.check(ENDLESS, "x"), checker.check(Structure("regex", "ab"), "x"), return_exceptions=True
        )
        refused, passed = await waiting
        assert isinstance(refused, InvalidRequest) and "s to compile" in str(refused)
        assert passed is None and pid_of(checker) != first
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        # It is remembered: the process lives on.
        second = pid_of(checker)
        with pytest.raises(InvalidRequest):
            await checker.check(ENDLESS, "x")
        assert pid_of(checker) == second

    run(work, model, timeout_s=2.0)


@pytest.mark.parametrize(
    "structure",
    [
        Structure("json_schema", '{"type":"integer","multipleOf":9973}'),
        Structure("json_schema", '{"allOf":[{"type":"integer","multipleOf":97},{"multipleOf":89}]}'),
        Structure("grammar", 'start: "a" | %json {"type":"integer","multipleOf":9973}'),
        Structure("grammar", "start: " + " ".join(f'"w{i}"' for i in range(3000))),
    ],
    ids=["multiple", "multiples", "in Lark", "long line"],
)
def test_what_would_take_much_memory_for_its_length_is_refused(model: Path, structure: Structure) -> None:
    """Engines keep what they have compiled: 41 characters took 90 MB of each."""

    async def work(checker: Checker) -> None:
        multiples = [{"type": "integer", "multipleOf": count} for count in (1000, 3600, 86400)]
        for grammar in (*multiples, {"type": "number", "multipleOf": 0.01}):
            await checker.check(Structure("json_schema", json.dumps(grammar)), "x")
        with pytest.raises(InvalidRequest, match=r"^x: takes \d+ KiB, and one of its length may take \d+; simplify"):
            await checker.check(structure, "x")

    run(work, model)


@pytest.mark.parametrize("form", ["properties", "choices", "words"])
def test_large_ones_of_a_usual_kind_pass(model: Path, form: str) -> None:
    names = [f"property_number_{i}" for i in range(1000)]
    structure = {
        "properties": Structure("json_schema", json.dumps({"properties": {n: {"type": "string"} for n in names}})),
        "choices": Structure("choice", json.dumps(names)),
        "words": Structure("json_schema", json.dumps({"enum": names})),
    }[form]
    run(lambda checker: checker.check(structure, "x"), model)


def test_a_client_that_leaves_does_not_mix_up_the_answers(model: Path) -> None:
    async def work(checker: Checker) -> None:
        await checker.check(GOOD, "x")
        task = asyncio.create_task(checker.check(ENDLESS, "x"))
        asyncio.get_running_loop().call_later(0.2, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        await checker.check(Structure("regex", "abc"), "x")
        with pytest.raises(InvalidRequest):
            await checker.check(Structure("regex", "(["), "x")

    run(work, model, timeout_s=3.0)


def test_a_client_that_leaves_ends_nothing(model: Path) -> None:
    async def work(checker: Checker) -> None:
        await checker.check(GOOD, "x")
        first = pid_of(checker)
        leaving = asyncio.create_task(checker.check(Structure("regex", "(["), "x"))
        staying = asyncio.create_task(checker.check(Structure("regex", "(["), "x"))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(InvalidRequest):
            await staying
        assert pid_of(checker) == first and not checker._asking

    run(work, model)


def test_a_process_that_dies_unseen_is_replaced(model: Path) -> None:
    """Killed between two requests, before anybody has noticed: not the fault of the next grammar."""

    async def work(checker: Checker) -> None:
        await checker.check(GOOD, "x")
        os.kill(pid_of(checker), signal.SIGKILL)
        await checker.check(Structure("regex", "abc"), "x")

    run(work, model)


def test_a_killed_process_is_replaced(model: Path) -> None:
    async def work(checker: Checker) -> None:
        await checker.check(GOOD, "x")
        os.kill(pid_of(checker), signal.SIGKILL)
        assert checker._process is not None
        await checker._process.wait()
        await checker.check(Structure("regex", "abc"), "x")

    run(work, model)


def test_a_process_that_does_not_get_to_run_says_nothing_of_the_grammar(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Structure("regex", "abcd")

    async def work(checker: Checker) -> None:
        await checker.check(GOOD, "x")
        os.kill(pid_of(checker), signal.SIGSTOP)
        monkeypatch.setattr(module, "_WALL", 0.01)
        with pytest.raises(Overloaded, match=r"no answer within 0\.2 s.*busy"):
            await checker.check(asked, "x")
        monkeypatch.setattr(module, "_WALL", 20.0)
        await checker.check(asked, "x")

    run(work, model)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_others_kill_says_nothing_of_the_grammar(
    model: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    asked = Structure("regex", "abcd")

    async def work(checker: Checker) -> None:
        await checker.check(GOOD, "x")
        with monkeypatch.context() as patch:
            patch.setattr(module, "_answer", killed)
            with pytest.raises(Overloaded, match="killed twice"):
                await checker.check(asked, "x")
        await checker.check(asked, "x")

    async def killed(process: asyncio.subprocess.Process, _: Structure) -> bytes:
        process.send_signal(number)
        return b""

    run(work, model)


def test_a_process_that_does_not_start_says_nothing_of_the_grammar(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(checker: Checker) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, "_START_TIMEOUT_S", 0.0)
            with pytest.raises(Overloaded, match="did not start within 0 s"):
                await checker.check(GOOD, "x")
        await checker.check(GOOD, "x")

    run(work, model)


def test_a_crowd_is_turned_away(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_WAITING", 3)

    async def work(checker: Checker) -> None:
        results = await asyncio.gather(
            *(checker.check(Structure("regex", f"a{i}"), "x") for i in range(5)), return_exceptions=True
        )
        assert [type(r) for r in results] == [type(None)] * 4 + [Overloaded]  # one is checked, three wait

    run(work, model)


def test_the_grammars_of_one_tenant_do_not_hold_up_those_of_others(model: Path) -> None:
    async def work(checker: Checker) -> None:
        await checker.check(GOOD, "x")
        order: list[str] = []

        async def ask(who: str, text: str) -> None:
            await checker.check(Structure("regex", text), "x", who)
            order.append(f"{who} {text}")

        many = [ask("many", f"a{i}") for i in range(6)]
        await asyncio.gather(*many, ask("few", "b"), ask("few", "a5"))
        assert order.index("few b") <= 2 and order.index("few a5") <= 4, order

    run(work, model)

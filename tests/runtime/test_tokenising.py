"""Long texts are tokenised in turns of clients, within the request's time, and by nobody else's threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from isthmus_runtime import tokenising
from isthmus_runtime.errors import DeadlineExceeded, InvalidRequest, Overloaded
from isthmus_runtime.request import GenerateRequest, PromptText, SamplingParams
from isthmus_runtime.tokenising import AT_ONCE, LARGE, Tokenising

LONG = 4097
DEADLINE_S = 30.0


def request(text: str, client: str = "", timeout_s: float = DEADLINE_S, salt: str = "") -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        sampling=SamplingParams(max_tokens=100),
        cache_salt=salt,
        client=client,
        timeout_s=timeout_s,
        prompt=PromptText(text=text, special=True, room=50),
    )


@contextmanager
def slow() -> Iterator[tuple[Tokenising, threading.Semaphore]]:
    """Texts of "s" wait until this ends; the semaphore counts those that do."""
    over, waiting = threading.Event(), threading.Semaphore(0)

    def tokenise(prompt: PromptText) -> list[int]:
        if prompt.text.startswith("s"):
            waiting.release()
            assert over.wait(DEADLINE_S)
        return [1, 2, 3]

    try:
        yield Tokenising(tokenise), waiting
    finally:
        over.set()


def run(main: Callable[[], object]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await main()  # type: ignore[misc]

    asyncio.run(bounded())


@pytest.mark.parametrize("size", [5, LONG], ids=["here", "on a thread"])
def test_ids_and_what_is_left_of_the_time(size: int) -> None:
    async def main() -> None:
        asked = request("x" * size)
        found = await Tokenising(lambda prompt: [7] * 40).by_ids(asked)
        assert found.prompt is None and found.prompt_token_ids == (7,) * 40 and found.sampling.max_tokens == 10
        assert found.timeout_s < asked.timeout_s if size == LONG else found.timeout_s == asked.timeout_s

    run(main)


def test_refusals_pass() -> None:
    def refuse(prompt: PromptText) -> list[int]:
        raise InvalidRequest("prompt: no", param="prompt")

    async def main() -> None:
        for size in (5, LONG):
            with pytest.raises(InvalidRequest, match="no"):
                await Tokenising(refuse).by_ids(request("x" * size))

    run(main)


def test_a_text_that_takes_long_ends_its_request_in_time() -> None:
    async def main() -> None:
        with slow() as (found, _), pytest.raises(DeadlineExceeded, match="--request-timeout"):
            await found.by_ids(request("s" * LONG, timeout_s=0.05))

    run(main)


def test_slow_texts_of_one_client_that_has_left_keep_no_other_waiting() -> None:
    async def main() -> None:
        with slow() as (found, waiting):
            # A salt is each client's to choose: a few of them make no more clients of one.
            asked = [request("s" * LONG, "a", salt=str(number)) for number in range(60)]
            leaving = [asyncio.create_task(found.by_ids(one)) for one in asked]
            assert await asyncio.to_thread(waiting.acquire, timeout=DEADLINE_S)
            for one in leaving:
                one.cancel()
            await asyncio.wait(leaving)
            assert (await found.by_ids(request("x" * LONG, "b"))).prompt_token_ids == (1, 2, 3)

    run(main)


def test_too_many_that_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenising, "_MOST_WAITING", 3)

    async def main() -> None:
        with slow() as (found, _):
            asked = [asyncio.create_task(found.by_ids(request("s" * LONG, "a"))) for _ in range(40)]
            done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            assert {type(one.exception()) for one in done} == {Overloaded} and waiting
            for one in waiting:
                one.cancel()

    run(main)


def test_large_texts_wait_until_what_they_take_is_there() -> None:
    async def main() -> None:
        begun, some, go = list[str](), threading.Semaphore(0), threading.Event()

        def tokenise(prompt: PromptText) -> Sequence[int]:
            begun.append(prompt.text[0])
            some.release()
            assert go.wait(DEADLINE_S)
            return [7]

        made = Tokenising(tokenise, most=lambda: 2 * AT_ONCE + LARGE)
        sizes = {"a": LARGE + 1, "b": LARGE + 1, "c": LARGE}
        asked = [asyncio.create_task(made.by_ids(request(name * size, name))) for name, size in sizes.items()]
        for _ in range(2):
            assert await asyncio.to_thread(some.acquire, timeout=DEADLINE_S)
        assert sorted(begun) == ["a", "c"]
        go.set()
        for one in asked:
            assert (await one).prompt_token_ids == (7,)
        assert made._reserve.used == 0

    run(main)

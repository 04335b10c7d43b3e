"""A reconcile does not wait for pods that say nothing, and a service hears of what they say later."""

import asyncio
from collections.abc import Iterable

from isthmus_operator.plan.observed import EngineFacts, Facts, Pod
from isthmus_operator.shell.known_facts import KnownFacts

KEY = ("ns", "svc")
SOME = Facts(engines={"p": EngineFacts(fingerprint="x")})


class Reader:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.patient: list[bool] = []
        self.answer: asyncio.Future[Facts] = asyncio.get_running_loop().create_future()

    async def read(self, namespace: str, pods: Iterable[Pod], *, load: bool, patient: bool = False) -> Facts:
        self.asked += 1
        self.patient.append(patient)
        return await asyncio.shield(self.answer)

    async def close(self) -> None:
        """Nothing to close."""

    def says(self, facts: Facts) -> None:
        self.answer.set_result(facts)
        self.answer = asyncio.get_running_loop().create_future()


def test_answers_that_are_there_are_returned_at_once_and_wake_nobody() -> None:
    async def main() -> None:
        reader, woken = Reader(), []
        known = KnownFacts(reader, woken.append)
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, reader.says, SOME)
        assert await known.read(KEY, [], load=False) == SOME
        await asyncio.sleep(0)
        assert woken == []
        await known.close()

    asyncio.run(main())


def test_late_answers_wake_the_service_once_and_only_if_they_are_news() -> None:
    async def main() -> None:
        reader = Reader()
        woken: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        known = KnownFacts(reader, woken.put_nowait)
        assert await known.read(KEY, [], load=False) is None
        assert await known.read(KEY, [], load=False) is None
        assert reader.asked == 1, "one question at a time"
        reader.says(SOME)
        assert await asyncio.wait_for(woken.get(), 10) == KEY
        # The same again, late again: what was known is returned meanwhile, and nobody is woken.
        assert await known.read(KEY, [], load=False) == SOME
        reader.says(SOME)
        assert await known.read(KEY, [], load=False) == SOME
        assert woken.empty()
        assert reader.patient == [True, False], "after a start, when all are asked at once, they get more time"
        # And those that have fallen silent.
        assert await known.read(KEY, [], load=False) == SOME
        reader.says(Facts())
        assert await asyncio.wait_for(woken.get(), 10) == KEY
        await known.close()

    asyncio.run(main())


def test_a_service_that_goes_while_its_pods_are_asked_stops_no_worker() -> None:
    async def main() -> None:
        reader, woken = Reader(), []
        known = KnownFacts(reader, woken.append)
        reading = asyncio.create_task(known.read(KEY, [], load=False))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        known.forget(KEY)
        assert await reading is None
        assert woken == []
        await known.close()

    asyncio.run(main())


def test_a_service_that_goes_in_the_moment_of_the_answer_takes_nothing_from_its_successor() -> None:
    class Leaving(Reader):
        """Between its answer and whoever waits for it, the service is replaced by another of its name."""

        async def read(self, namespace: str, pods: Iterable[Pod], *, load: bool, patient: bool = False) -> Facts:
            if not self.asked:
                asyncio.get_running_loop().call_soon(replaced)
                self.asked += 1
                return SOME
            return await super().read(namespace, pods, load=load, patient=patient)

    def replaced() -> None:
        known.forget(KEY)
        known._asked[KEY] = asyncio.create_task(reader.read("ns", [], load=False))

    async def main() -> None:
        nonlocal reader, known
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        reader = Leaving()
        known = KnownFacts(reader, lambda key: None)
        assert await known.read(KEY, [], load=False) == SOME
        await asyncio.sleep(0)
        assert errors == []
        assert KEY in known._asked
        assert KEY not in known._last
        await known.close()

    reader: Reader
    known: KnownFacts
    asyncio.run(main())

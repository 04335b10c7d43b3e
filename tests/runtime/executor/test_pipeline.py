"""Steps in flight: order of answers, the ring of slots, failures of launching and of work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

import pytest
import torch
from fake_device import FakeDevice

from isthmus_runtime.errors import EngineFailed
from isthmus_runtime.executor.pipeline import StepPipeline
from isthmus_runtime.executor.staging import StagingSlot
from isthmus_runtime.interfaces.steps import StepOutput, StepPlan

DEADLINE_S = 30.0


class Gate:
    """An event that tests open."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.error: Exception | None = None

    def open(self, error: Exception | None = None) -> None:
        self.error = error
        self._opened.set()

    def done(self) -> bool:
        return self._opened.is_set()

    def wait(self) -> None:
        assert self._opened.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error


class GatedDevice(FakeDevice):
    """Its events happen when the test says so, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: SimpleQueue[Gate] = SimpleQueue()

    def record(self) -> Gate:  # type: ignore[override]
        gate = Gate()
        self.gates.put(gate)
        return gate


class Recorder:
    """A runner that only notes what it is asked for."""

    def __init__(self) -> None:
        self.launched: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self.refuse: set[int] = set()

    def warm_up(self, slot: StagingSlot) -> None:
        pass

    def launch(self, plan: StepPlan, slot: StagingSlot) -> int:
        if plan.step in self.refuse:
            raise IndexError(f"row of step {plan.step}")
        self.launched.put((plan.step, id(slot)))
        return plan.step * 10

    def collect(self, plan: StepPlan, launched: int, slot: StagingSlot) -> StepOutput:
        assert launched == plan.step * 10
        return StepOutput(plan.step, ())


def plan(step: int) -> StepPlan:
    return StepPlan(step, (), (), (), 0)


@pytest.fixture
def pipeline() -> Iterator[Callable[..., tuple[StepPipeline[int], GatedDevice, Recorder]]]:
    made: list[StepPipeline[int]] = []

    def make(slots: int = 2) -> tuple[StepPipeline[int], GatedDevice, Recorder]:
        device, runner = GatedDevice(), Recorder()
        ring = [StagingSlot(device, capacity=8, max_draws=2, prompts=8) for _ in range(slots)]
        made.append(StepPipeline(device, runner, ring))
        return made[-1], device, runner

    yield make
    for one in made:
        assert one.close(DEADLINE_S), "a thread of the pipeline did not end"


def test_a_step_is_launched_while_another_runs_and_a_third_waits_for_a_slot(pipeline: Callable[..., object]) -> None:
    steps, device, runner = pipeline()  # type: ignore[misc]
    futures = [steps.submit(plan(number)) for number in range(3)]
    (first, slot), (second, other) = (runner.launched.get(timeout=DEADLINE_S) for _ in range(2))
    assert (first, second) == (0, 1) and slot != other
    gates = [device.gates.get(timeout=DEADLINE_S) for _ in range(2)]
    with pytest.raises(Empty):
        runner.launched.get_nowait()
    assert not any(future.done() for future in futures)
    gates[0].open()
    assert futures[0].result(DEADLINE_S).step == 0
    assert runner.launched.get(timeout=DEADLINE_S) == (2, slot)
    gates[1].open()
    device.gates.get(timeout=DEADLINE_S).open()
    assert [future.result(DEADLINE_S).step for future in futures] == [0, 1, 2]


def test_answers_keep_the_order_of_launch_whatever_happens_first(pipeline: Callable[..., object]) -> None:
    steps, device, _ = pipeline()  # type: ignore[misc]
    first, second = steps.submit(plan(0)), steps.submit(plan(1))
    gates = [device.gates.get(timeout=DEADLINE_S) for _ in range(2)]
    order: list[int] = []
    for future in (first, second):
        future.add_done_callback(lambda done: order.append(done.result().step))
    gates[1].open()
    assert not second.done()
    gates[0].open()
    assert second.result(DEADLINE_S).step == 1 and first.done()
    assert order == [0, 1]


def test_a_step_that_cannot_be_launched_fails_those_after_it_not_those_before(pipeline: Callable[..., object]) -> None:
    steps, device, runner = pipeline()  # type: ignore[misc]
    runner.refuse.add(1)
    futures = [steps.submit(plan(number)) for number in range(3)]
    gate = device.gates.get(timeout=DEADLINE_S)
    assert "step 1 failed: the fake device: row of step 1" in str(futures[1].exception(DEADLINE_S))
    assert isinstance(futures[2].exception(DEADLINE_S), EngineFailed)
    gate.open()
    assert futures[0].result(DEADLINE_S).step == 0
    assert "step 1 failed" in str(steps.submit(plan(9)).exception(DEADLINE_S))


def test_work_that_fails_fails_every_step_in_flight_and_after(pipeline: Callable[..., object]) -> None:
    """A card that falls off the bus: its events report the error, and nothing hangs."""
    steps, device, _ = pipeline()  # type: ignore[misc]
    futures = [steps.submit(plan(number)) for number in range(4)]
    gates = [device.gates.get(timeout=DEADLINE_S) for _ in range(2)]
    lost = RuntimeError("the GPU is lost")
    gates[0].open(lost)
    gates[1].open(lost)
    for future in futures:
        error = future.exception(DEADLINE_S)
        assert isinstance(error, EngineFailed) and "step 0 failed: the fake device: the GPU is lost" in str(error)
    assert isinstance(steps.submit(plan(9)).exception(DEADLINE_S), EngineFailed)


def test_close_finishes_what_runs(pipeline: Callable[..., object]) -> None:
    steps, device, _ = pipeline()  # type: ignore[misc]
    futures = [steps.submit(plan(number)) for number in range(4)]
    gates = [device.gates.get(timeout=DEADLINE_S) for _ in range(2)]
    assert steps.close(0.0) is False
    for gate in gates:
        gate.open()
    assert [future.result(DEADLINE_S).step for future in futures[:2]] == [0, 1]
    for future in futures[2:]:
        assert "the executor is closed" in str(future.exception(DEADLINE_S))


def test_a_failed_warm_up_is_raised_where_the_executor_is_made() -> None:
    class Refusing(Recorder):
        def warm_up(self, slot: StagingSlot) -> None:
            raise torch.OutOfMemoryError("no memory for graphs")

    device = GatedDevice()
    with pytest.raises(torch.OutOfMemoryError, match="no memory for graphs"):
        StepPipeline(device, Refusing(), [StagingSlot(device, capacity=8, max_draws=2, prompts=8)])


def test_a_step_is_taken_back_until_it_is_launched(pipeline: Callable[..., object]) -> None:
    steps, device, runner = pipeline()  # type: ignore[misc]
    futures = [steps.submit(plan(number)) for number in range(4)]
    gates = [device.gates.get(timeout=DEADLINE_S) for _ in range(2)]
    launched = [runner.launched.get(timeout=DEADLINE_S)[0] for _ in range(2)]
    assert launched == [0, 1]
    assert [future.cancel() for future in futures] == [False, False, True, True]
    after = steps.submit(plan(4))
    for gate in gates:
        gate.open()
    device.gates.get(timeout=DEADLINE_S).open()
    assert [future.result(DEADLINE_S).step for future in (*futures[:2], after)] == [0, 1, 4]
    assert runner.launched.get(timeout=DEADLINE_S)[0] == 4


@pytest.mark.parametrize("closes", [True, False])
def test_a_step_that_was_taken_back_is_not_failed_as_well(pipeline: Callable[..., object], closes: bool) -> None:
    steps, device, _ = pipeline()  # type: ignore[misc]
    futures = [steps.submit(plan(number)) for number in range(4)]
    gates = [device.gates.get(timeout=DEADLINE_S) for _ in range(2)]
    assert futures[3].cancel()
    if closes:
        assert steps.close(0.0) is False
    for gate in gates:
        gate.open(None if closes else RuntimeError("lost"))
    assert isinstance(futures[2].exception(DEADLINE_S), EngineFailed)
    assert futures[3].cancelled()

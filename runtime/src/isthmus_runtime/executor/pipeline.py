"""Steps in flight: each is described and launched while the one before it runs, and completed by its event.

Two threads. One takes plans in the order of submission, waits for a free staging slot, builds the step's inputs in it
and enqueues its work; it never waits for a result. The other waits for the events, in order, and answers. Where work
is done as soon as it is enqueued (a CPU), the first answers at once and the second sleeps.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import Generic, Protocol, TypeVar

import torch

from ..errors import EngineFailed
from ..interfaces.steps import StepOutput, StepPlan
from .device.base import Device, Event
from .staging import StagingSlot

_LOG = logging.getLogger(__name__)

Launched = TypeVar("Launched")


class Runner(Protocol[Launched]):
    """What a step does. `launch` belongs to the launching thread."""

    def warm_up(self, slot: StagingSlot) -> None:
        """Everything that the first step should not have to wait for."""

    def launch(self, plan: StepPlan, slot: StagingSlot) -> Launched:
        """Build the step's inputs in `slot` and enqueue its work. Returns before the work is done."""

    def collect(self, plan: StepPlan, launched: Launched, slot: StagingSlot) -> StepOutput:
        """Read the result of a step whose work is done."""


@dataclass(frozen=True, slots=True)
class _InFlight(Generic[Launched]):
    plan: StepPlan
    future: Future[StepOutput]
    slot: StagingSlot
    launched: Launched
    event: Event


class StepPipeline(Generic[Launched]):
    """Runs the steps of one executor in order, at most one a slot in flight."""

    def __init__(self, device: Device, runner: Runner[Launched], slots: Sequence[StagingSlot]) -> None:
        """Starts the threads, and returns when the runner has warmed up. Raises what that raised."""
        self._device = device
        self._runner = runner
        self._changed = threading.Condition()
        self._queue: deque[tuple[StepPlan, Future[StepOutput]]] = deque()
        self._free = deque(slots)
        self._in_flight: deque[_InFlight[Launched]] = deque()
        self._broken = ""
        self._broken_by_work = False
        """Work that was enqueued failed, and with it all that came after."""
        self._closed = False
        self._launching = True
        ready: Future[None] = Future()
        self._threads = [
            threading.Thread(target=self._launch_steps, args=(ready,), name="executor", daemon=True),
            threading.Thread(target=self._complete_steps, name="executor-completion", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        try:
            ready.result()
        except BaseException:
            self.close(1.0)
            raise

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Queue a step. The future fails with EngineFailed once the executor is broken or closed."""
        future: Future[StepOutput] = Future()
        with self._changed:
            refusal = self._broken or ("the executor is closed" if self._closed else "")
            if not refusal:
                self._queue.append((plan, future))
                self._changed.notify_all()
        if refusal:
            future.set_exception(EngineFailed(f"step {plan.step} was not run: {refusal}"))
        return future

    def close(self, timeout_s: float) -> bool:
        """Finish the steps in flight, fail those that wait, stop the threads. False: a step still runs."""
        deadline = monotonic() + timeout_s
        with self._changed:
            self._closed = True
            waiting = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for plan, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineFailed(f"step {plan.step} was not run: the executor is closed"))
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # ------------------------------------------------------------------------------------------------ launching thread

    def _launch_steps(self, ready: Future[None]) -> None:
        self._device.enter()
        with torch.inference_mode():
            try:
                self._runner.warm_up(self._free[0])
            except BaseException as e:
                ready.set_exception(e)
                self._stop_launching()
                return
            ready.set_result(None)
            while (work := self._next()) is not None:
                plan, future, slot = work
                try:
                    launched = self._runner.launch(plan, slot)
                    step = _InFlight(plan, future, slot, launched, self._device.record())
                    alone = not self._in_flight and step.event.done()
                except Exception as e:
                    # What was launched before may still end well.
                    self._fail([(plan, future)], e)
                    break
                if alone:
                    self._complete(step)
                else:
                    with self._changed:
                        self._in_flight.append(step)
                        self._changed.notify_all()
        self._stop_launching()

    def _next(self) -> tuple[StepPlan, Future[StepOutput], StagingSlot] | None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._closed or self._broken or (self._queue and self._free))
                if self._closed or self._broken:
                    return None
                plan, future = self._queue.popleft()
                if future.set_running_or_notify_cancel():  # else it was taken back
                    return plan, future, self._free.popleft()

    def _stop_launching(self) -> None:
        with self._changed:
            self._launching = False
            self._changed.notify_all()

    # ---------------------------------------------------------------------------------------------- completing thread

    def _complete_steps(self) -> None:
        self._device.enter()
        with torch.inference_mode():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._in_flight or not self._launching)
                    if not self._in_flight:
                        return
                    step = self._in_flight[0]
                # It stays there meanwhile: the launching thread answers at once only if nothing is before it.
                self._complete(step)
                with self._changed:
                    self._in_flight.popleft()

    def _complete(self, step: _InFlight[Launched]) -> None:
        """Wait for the step, answer, and free its slot. Steps complete in the order of their launch."""
        if self._broken_by_work:
            step.future.set_exception(EngineFailed(f"step {step.plan.step} has no result: {self._broken}"))
            return
        try:
            step.event.wait()
            output = self._runner.collect(step.plan, step.launched, step.slot)
        except Exception as e:
            self._broken_by_work = True
            self._fail([(step.plan, step.future)], e)
            return
        with self._changed:
            self._free.append(step.slot)
            self._changed.notify_all()
        step.future.set_result(output)

    # ------------------------------------------------------------------------------------------------------ any thread

    def _fail(self, failed: list[tuple[StepPlan, Future[StepOutput]]], error: Exception) -> None:
        """Nothing is launched after a failed step: fail it, and all that wait."""
        step = failed[0][0].step
        _LOG.error("step %d failed; the executor stops", step, exc_info=error)
        reason = f"step {step} failed: {self._device.explain(error)}"
        with self._changed:
            self._broken = self._broken or reason
            waiting = [(plan, future) for plan, future in self._queue if future.set_running_or_notify_cancel()]
            self._queue.clear()
            self._changed.notify_all()
        for plan, future in failed + waiting:
            future.set_exception(
                EngineFailed(reason if plan.step == step else f"step {plan.step} was not run: {reason}")
            )

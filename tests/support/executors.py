"""Executors that misbehave on purpose."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from isthmus_runtime.executor.fake import FakeExecutor
from isthmus_runtime.interfaces.steps import StepOutput, StepPlan

DEADLINE_S = 20


class Breaking(FakeExecutor):
    """Fails at its third step, for good."""

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        if plan.step < 3:
            return super().submit(plan)
        broken: Future[StepOutput] = Future()
        broken.set_exception(RuntimeError("device lost"))
        return broken


class Gated(FakeExecutor):
    """Runs a step only when the test opens the gate."""

    def __init__(self) -> None:
        super().__init__(65, 4)
        self.gate = threading.Event()
        self.queued = threading.Event()

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        future = super().submit(plan)
        if plan.step == 2:
            self.queued.set()
        return future

    def run(self, plan: StepPlan) -> StepOutput:
        assert self.gate.wait(DEADLINE_S)
        return super().run(plan)

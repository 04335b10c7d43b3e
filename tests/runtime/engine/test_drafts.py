"""Speculative decoding: what is generated does not depend on guesses, and guesses are made where they are right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from engine_world import World, request
from forced_stretches import Stretches
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.engine.drafters import CATCH_UP, GRAM, TRUSTED, Drafter
from isthmus_runtime.engine.drafts import Speculation
from isthmus_runtime.engine.masks import MaskThread
from isthmus_runtime.engine.sequence import Kind
from isthmus_runtime.engine.step_time import StepSize, StepTimes
from isthmus_runtime.executor.fake import expected_tokens
from isthmus_runtime.interfaces.steps import Forced, LateMask, Later
from isthmus_runtime.request import FinishReason, SamplingParams


def longest_earlier(tokens: list[int]) -> set[int]:
    """Ends of the earlier places with the longest match with the end of `tokens`, by definition; at least `GRAM`."""
    found: dict[int, set[int]] = {}
    for end in range(GRAM, len(tokens)):
        same = 0
        while same < min(end, 16) and tokens[end - 1 - same] == tokens[-1 - same]:
            same += 1
        if same >= GRAM:
            found.setdefault(same, set()).add(end)
    return found[max(found)] if found else set()


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 6))
def test_a_guess_is_what_followed_the_longest_match(tokens: list[int], count: int) -> None:
    guess = Drafter().guess(tokens, count)
    places = longest_earlier(tokens)
    continued = [tuple((tokens + tokens[p:] * count)[p : p + count]) for p in places]
    if len(places) <= 1:
        assert guess == (continued[0] if places else ())
    assert bool(guess) == bool(places) and (not guess or len(guess) == count)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.data())
def test_learning_bit_by_bit_is_learning_at_once(tokens: list[int], data: Any) -> None:
    bits, at = Drafter(), 0
    while at < len(tokens):
        at = data.draw(st.integers(at + 1, len(tokens)))
        bits.learn(tokens[:at])
    assert bits.guess(tokens, 4) == Drafter().guess(tokens, 4)


def test_a_long_prompt_is_looked_through_in_parts() -> None:
    drafter, tokens = Drafter(), [1, 2, 3, 4] * CATCH_UP
    turns = 1
    while not drafter.learn(tokens):
        turns += 1
    assert turns == 4 and drafter.guess(tokens, 5) == (1, 2, 3, 4, 1)


def test_a_row_guesses_once_its_guesses_would_have_been_right_and_stops_when_they_are_not() -> None:
    drafter, tokens = Drafter(), [1, 2, 3, 4, 1, 2, 3]
    drafter.learn(tokens[:-1])
    turned = []
    for token in [4, 1, 2, 3, 4, 1, 2]:
        turned.append(drafter.watch(tokens))
        tokens.append(token)
    assert turned[0] is False and turned[-1] is True
    for _ in range(10):
        drafter.judge(False)
    assert drafter.trust < TRUSTED


def test_drafts_stop_where_they_cost_more_than_they_save() -> None:
    times = StepTimes()
    for _ in range(200):
        times.learn(StepSize(1, 0, 0.0), 10e-3)
        times.learn(StepSize(1, 64, 2048.0), 74e-3)
    speculation = Speculation(8, times)
    speculation.begin(1)
    few, many = speculation._most(0.6, 8), speculation._most(0.95, 8)
    assert 1 <= few < many == 8
    for _ in range(400):
        times.learn(StepSize(32, 0, 0.0), 30e-3)
    speculation.begin(32)
    assert speculation._most(0.6, 8) == 0


class Oracle(Drafter):
    """Guesses right as often as it is told to: what the fake executor generates does not repeat."""

    __slots__ = ("_answer", "_right", "_rng", "_start")

    def __init__(self, answer: list[int], start: int, right: float, seed: int) -> None:
        super().__init__()
        self._answer, self._start, self._right, self._rng = answer, start, right, random.Random(seed)
        self.trust = 1.0

    def judge(self, right: bool) -> None:
        pass

    def learn(self, tokens: Any) -> bool:
        return True

    def watch(self, tokens: Any) -> bool:
        return True

    def guess(self, tokens: Any, count: int) -> tuple[int, ...]:
        at = len(tokens) - self._start
        assert list(tokens[self._start :]) == self._answer[:at]
        return tuple(t if self._rng.random() < self._right else t + 1 for t in self._answer[at : at + count])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    windows=st.sampled_from([(None,), (6,), (None, 6)]),
    blocks=st.sampled_from([16, 24, 65]),
    caching=st.booleans(),
    depth=st.sampled_from([1, 2]),
)
def test_answers_are_those_without_guesses(
    seed: int, right: float, windows: Any, blocks: int, caching: bool, depth: int
) -> None:
    """Through preemption, prefix hits, windows and stops, greedy and by seed, beside rows without guesses."""
    rng = random.Random(seed)
    world = World(
        num_blocks=blocks * len(windows), windows=windows, prefix_caching=caching, depth=depth, speculative_tokens=5
    )
    want: dict[str, list[int]] = {}
    stops_of: dict[str, tuple[int, ...]] = {}
    for number in range(6):
        sid, count = f"r{number}", rng.randint(1, 30)
        prompt = [7] * rng.randint(1, 8) + [rng.randrange(50) for _ in range(rng.randint(0, 12))]
        options = {"temperature": float(number % 2), "seed": number}
        answer = expected_tokens(prompt, SamplingParams(max_tokens=count, **options), count, windows)  # type: ignore[arg-type]
        stops = (rng.choice(answer),) if rng.random() < 0.5 else ()
        stops_of[sid] = stops
        end = answer.index(stops[0]) + 1 if stops else count
        want[sid] = answer[:end]
        world.add(request(sid, prompt, count, stop_token_ids=stops, logprobs=number % 3 - 1, **options))
        if number != 5:
            beyond = answer + expected_tokens(prompt + answer, SamplingParams(max_tokens=8, **options), 8, windows)  # type: ignore[arg-type]
            world.scheduler.queues.live[sid].drafter = Oracle(beyond, len(prompt), right, seed + number)
    world.run()
    assert world.tokens == want
    for sid, tokens in want.items():
        assert world.finish(sid) is (FinishReason.STOP if tokens[-1] in stops_of[sid] else FinishReason.LENGTH)
    stats = world.scheduler.stats()
    assert stats.accepted <= stats.drafted
    if right == 0:
        assert stats.accepted == 0


def test_right_guesses_save_steps() -> None:
    def steps(most: int) -> int:
        world = World(speculative_tokens=most, max_model_len=64)
        answer = expected_tokens([1, 2, 3], SamplingParams(max_tokens=48, temperature=0.0), 60)
        world.add(request("r", [1, 2, 3], 48))
        if most:
            world.scheduler.queues.live["r"].drafter = Oracle(answer, 3, 1.0, 0)
        world.run()
        assert world.tokens["r"] == answer[:48]
        return world.scheduler.steps.newest

    assert steps(5) * 4 < steps(0)


class Anything:
    """Allows any token."""

    apart_s = 0.0

    def lost(self) -> None:
        return None

    def allowed(self, generated: Sequence[int]) -> bytes | None:
        return None

    def forced(self, generated: Sequence[int], most: int) -> Forced:
        return Forced()


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    windows=st.sampled_from([(None,), (6,), (None, 6)]),
    blocks=st.sampled_from([16, 24, 65]),
    caching=st.booleans(),
    depth=st.sampled_from([1, 2]),
    late=st.booleans(),
)
def test_answers_are_those_without_telling_what_is_forced(
    seed: int, windows: Any, blocks: int, caching: bool, depth: int, late: bool
) -> None:
    """Through preemption, prefix hits, windows, stops and ends amid a forced stretch, beside rows without grammars."""

    def answers(tells: bool) -> tuple[dict[str, list[int]], dict[str, FinishReason]]:
        rng = random.Random(seed)
        world = World(
            num_blocks=blocks * len(windows), windows=windows, prefix_caching=caching, depth=depth, late_masks=late
        )
        for number in range(6):
            prompt = [7] * rng.randint(1, 8) + [rng.randrange(50) for _ in range(rng.randint(0, 12))]
            stops = (rng.randrange(300, 312),) if rng.random() < 0.3 else ()
            options = {"temperature": float(number % 2), "seed": number, "stop_token_ids": stops}
            masks = None if number == 5 else Stretches(tells=tells)
            world.add(request(f"r{number}", prompt, rng.randint(1, 30), **options), masks=masks)
        world.run()
        assert not world.scheduler.stats().drafted
        return world.tokens, {sid: world.finish(sid) for sid in world.tokens}

    assert answers(True) == answers(False)


def test_forced_tokens_save_steps() -> None:
    def steps(tells: bool) -> tuple[int, int, list[int]]:
        world = World(max_model_len=128, num_blocks=65)
        world.add(request("r", [1, 2, 3], 100), masks=Stretches(tells=tells))
        world.run()
        return world.scheduler.steps.newest, world.scheduler.stats().forced, world.tokens["r"]

    (many, none, plain), (few, forced, fast) = steps(False), steps(True)
    assert fast == plain and none == 0
    assert forced > 30 and many - few >= 0.9 * forced, (many, few, forced)


class EveryFourth(Stretches):
    """One token of four is forced. A late mask is there by the time of the draw."""

    def __init__(self, world: World, sid: str) -> None:
        super().__init__(tells=True)
        self.world, self.sid = world, sid

    def next(self, generated: Sequence[int]) -> int | None:
        return 301 if len(generated) % 4 == 3 else None

    def late(self, count: int) -> LateMask:
        return Drawn(self)


class Drawn:
    """Looks at what the steps in flight have drawn."""

    def __init__(self, masks: EveryFourth) -> None:
        self.masks = masks

    def wait(self, patience_s: float) -> bytes:
        world, sid = self.masks.world, self.masks.sid
        tokens = list(world.tokens[sid])
        for (_, work), output in zip(world.scheduler.steps.steps, world.in_flight, strict=False):
            for (seq, _, _), row in zip(work, output.rows, strict=True):
                tokens += row.tokens if seq.sid == sid else ()
        return self.masks.mask(tokens)


@pytest.mark.parametrize("grammars", [8, 4, 1])
def test_rows_with_a_few_forced_tokens_are_in_every_step_of_a_batch(grammars: int) -> None:
    """What is forced saves them a fourth of their steps. To wait for it would cost them, or all, more."""
    world = World(max_num_seqs=8, num_blocks=257, max_model_len=128, late_masks=True)
    for number in range(8):
        sid = f"r{number}"
        world.add(request(sid, [number, 2], 80), masks=EveryFourth(world, sid) if number < grammars else None)
    while world.turn():
        newest = world.scheduler.steps.steps[-1][1] if world.scheduler.steps.steps else []
        if world.steps > 12 and not any(world.ends.values()):
            assert len(newest) == 8 and len(world.in_flight) == 1, "steps are full, and planned ahead"
    assert not world.scheduler.stats().forced
    for number in range(grammars):
        assert world.tokens[f"r{number}"][3::4] == [301] * 20


class Computing(EveryFourth):
    """Its masks are computed only while the step runs."""

    def allowed(self, generated: Sequence[int], most: int = 0) -> bytes | Later:  # type: ignore[override]
        mask = super().allowed(generated, most)
        return Later.MASK if generated else mask

    def forced(self) -> Forced:
        return Forced()


def test_a_step_that_is_planned_late_does_not_leave_out_rows_whose_masks_are_being_computed() -> None:
    world = World(max_num_seqs=4, max_model_len=128, num_blocks=129, late_masks=True, depth=1)
    for number in range(4):
        sid = f"r{number}"
        world.add(request(sid, [number, 2], 40), masks=Computing(world, sid) if number < 2 else None)
    world.run()
    assert world.scheduler.steps.newest == 40
    assert all(len(tokens) == 40 for tokens in world.tokens.values())
    assert world.tokens["r0"][3::4] == world.tokens["r1"][3::4] == [301] * 10


def test_a_row_that_misses_draws_again_and_again_is_planned_after_its_masks_ever_longer() -> None:
    """One that missed a single draw, on a machine that was held up, is planned ahead again at once."""
    world = World(max_model_len=256, num_blocks=257, late_masks=True)
    world.add(request("slow", [1, 2, 3], 150), masks=Stretches(tells=False))
    world.add(request("free", [4, 5, 6], 150))
    slow, missed, till = world.scheduler.queues.live["slow"], [], 0
    while world.turn():
        if slow.masks_late_from != till:
            till = slow.masks_late_from
            missed.append(till - len(slow.tokens))
    assert missed[:7] == [2, 4, 8, 16, 32, 32, 32], missed
    assert len(world.tokens["slow"]) == 150


def test_a_row_whose_mask_is_slow_is_not_waited_for_again() -> None:
    class Slow(Stretches):
        slow = False

        def allowed(self, generated: Sequence[int], most: int = 0) -> bytes | Later:  # type: ignore[override]
            mask = super().allowed(generated, most)
            return Later.MASK if self.slow else mask

    world = World(max_model_len=128, num_blocks=65)
    masks = Slow(tells=True)
    world.add(request("r", [1, 2, 3], 100), masks=masks)
    while not world.scheduler.holds:
        world.turn()
    masks.slow = True
    while world.turn():
        pass
    assert not world.scheduler.holds
    masks.slow = False
    world.run()
    assert len(world.tokens["r"]) == 100


def test_who_may_guess() -> None:
    world = World(speculative_tokens=5)
    world.add(request("local", [1, 2], 4))
    world.add(request("send", [1, 2], 4), kind=Kind.SEND, attempt="send")
    live = world.scheduler.queues.live
    assert live["local"].drafter is not None and live["send"].drafter is None
    masks = MaskThread(lambda: None).beside(Anything())
    world.add(request("masked", [1, 2], 4), masks=masks)
    assert live["masked"].drafter is None
    off = World()
    off.add(request("local", [1, 2], 4))
    assert off.scheduler.queues.live["local"].drafter is None


@pytest.mark.parametrize("share", [1, 8])
def test_steps_are_planned_one_by_one_only_where_many_guess(share: int) -> None:
    world = World(speculative_tokens=5, max_num_seqs=8, num_blocks=65)
    for number in range(8):
        world.add(request(f"r{number}", [number, 2, 3], 20))
    for _ in range(6):
        world.turn()
    running = world.scheduler.queues.running
    assert len(running) == 8
    for seq in running:
        seq.holds = False
    assert not world.scheduler.holds
    for seq in running[:share]:
        seq.holds = True
    assert world.scheduler.holds is (share == 8)

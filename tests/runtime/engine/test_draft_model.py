"""Drafts of a small model: what its rows compute, whoever asks in which order, and that answers do not depend on it."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from engine_world import World, make_plan, request
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.engine.draft_model import Ask, DraftModel, DraftRows
from isthmus_runtime.engine.drafters import AGAIN, TRUSTED, ModelDrafter
from isthmus_runtime.engine.sequence import Kind
from isthmus_runtime.errors import ConfigError
from isthmus_runtime.executor.fake import MAX_TOKEN_IDS, VOCAB_SIZE, FakeExecutor, Windows, expected_tokens
from isthmus_runtime.kv.groups import GroupPlan
from isthmus_runtime.request import SamplingParams
from isthmus_runtime.serve_flags import parse_serve

LIKELIEST = SamplingParams(max_tokens=1, temperature=0.0)
MAX_LEN = 64


def draft_model(
    rows: int = 2, budget: int = 8, windows: Windows = (None,), vocab_size: int = MAX_TOKEN_IDS
) -> DraftModel:
    """Of an executor whose KV is garbage wherever nothing was written."""
    groups = tuple(GroupPlan(block_size=4, window=w, tokens_in_flight=0 if w is None else 16) for w in windows)
    blocks = 1 + rows * len(groups) * MAX_LEN // 4
    executor = FakeExecutor(blocks, 4, windows=windows)
    for block in range(blocks):
        executor.block_bytes(block)[:] = b"\xa5" * 32
    return DraftModel(executor, DraftRows(make_plan(blocks, 4, MAX_LEN, groups), rows, budget), vocab_size)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), windows=st.sampled_from([(None,), (6,), (None, 6)]))
def test_drafts_are_what_the_model_would_generate(seed: int, windows: Windows) -> None:
    """Requests share few rows, come back with other tokens than were guessed, and ask for prompts of several steps."""
    rng = random.Random(seed)
    model = draft_model(rows=2, budget=7, windows=windows)
    texts = {f"r{number}": [rng.randrange(50) for _ in range(rng.randint(1, 20))] for number in range(4)}
    for _ in range(12):
        asks = [Ask(sid, tuple(texts[sid]), rng.randint(1, 5)) for sid in rng.sample(sorted(texts), rng.randint(1, 2))]
        model._compute(asks)
        for ask in asks:
            drafts = model.answer(ask.sid, len(ask.tokens))
            assert list(drafts) == expected_tokens(ask.tokens, LIKELIEST, ask.count, windows), f"seed {seed}: {ask}"
            assert model.answer(ask.sid, len(ask.tokens) + 1) == ()
            kept = rng.randint(0, len(drafts))
            texts[ask.sid] = (texts[ask.sid] + list(drafts[:kept]) + [rng.randrange(50)])[: MAX_LEN - 6]


def test_what_is_computed_of_a_request_is_not_computed_again() -> None:
    model, tokens = draft_model(), tuple(range(20))
    rows = model._rows
    first = rows.plans([Ask("r", tokens, 3)])
    assert sum(plan.num_tokens for plan in first) == 20 + 2
    rows.drawn(Ask("r", tokens, 3), (7, 8, 9))
    again = rows.plans([Ask("r", (*tokens, 7, 8, 5), 3)])
    assert sum(plan.num_tokens for plan in again) == 1 + 2, "the third draft was wrong, the token after the second new"


class AtOnce(DraftModel):
    """Answers when it is asked, as a thread that is waited for; now and then wrong."""

    wrong, asked = 0.0, 0
    rng = random.Random(0)

    def ask(self, sid: str, tokens: Sequence[int], count: int) -> bool:
        count = min(count, self._rows.max_len - len(tokens))
        if count <= 0:
            return False
        self.asked += 1
        self._compute([Ask(sid, tuple(tokens), count)])
        return True

    def answer(self, sid: str, length: int) -> tuple[int, ...]:
        # Ids that are never drawn: another one might be, by chance.
        return tuple(t + VOCAB_SIZE * (self.rng.random() < self.wrong) for t in super().answer(sid, length))


def at_once(wrong: float, seed: int = 0) -> AtOnce:
    model = draft_model(rows=5)
    model.__class__ = AtOnce
    assert isinstance(model, AtOnce)
    model.wrong, model.rng = wrong, random.Random(seed)
    return model


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    wrong=st.sampled_from([0.0, 0.2, 1.0]),
    blocks=st.sampled_from([16, 65]),
    depth=st.sampled_from([1, 2]),
)
def test_answers_are_those_without_a_draft_model(seed: int, wrong: float, blocks: int, depth: int) -> None:
    rng = random.Random(seed)
    model = at_once(wrong, seed)
    world = World(num_blocks=blocks, depth=depth, speculative_tokens=4, draft_model=model)
    want: dict[str, list[int]] = {}
    for number in range(5):
        sid, count, options = f"r{number}", rng.randint(1, 25), {"temperature": float(number % 2), "seed": number}
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 20))]
        want[sid] = expected_tokens(prompt, SamplingParams(max_tokens=count, **options), count)  # type: ignore[arg-type]
        world.add(request(sid, prompt, count, **options))
    world.run()
    assert world.tokens == want
    stats = world.scheduler.stats()
    assert stats.accepted <= stats.drafted and (wrong < 1 or not stats.accepted)


def test_right_drafts_save_steps_and_wrong_ones_are_given_up() -> None:
    def run(model: AtOnce | None) -> World:
        world = World(speculative_tokens=4 if model else 0, draft_model=model)
        world.add(request("r", [1, 2, 3], 60))
        world.run()
        assert world.tokens["r"] == expected_tokens([1, 2, 3], LIKELIEST, 60)
        return world

    plain, fast = run(None), run(at_once(0.0))
    assert fast.scheduler.steps.newest * 2 < plain.scheduler.steps.newest
    model = at_once(1.0)
    run(model)
    assert 0 < model.asked < 12


def test_a_drafter_that_gave_up_tries_again() -> None:
    drafter = ModelDrafter(draft_model(), "r")
    assert drafter.watch([1])
    while drafter.trust >= TRUSTED:
        drafter.judge(False)
    turns = [drafter.watch([1]) for _ in range(AGAIN)]
    assert turns == [False] * (AGAIN - 1) + [True]


def test_a_model_that_does_not_answer_is_not_waited_for_again_and_again() -> None:
    drafter, waits = ModelDrafter(draft_model(), "r"), 0
    for _ in range(AGAIN):
        if drafter.watch([1]):
            assert drafter.guess([1], 2) == ()
            waits += 1
    assert waits <= 3


def test_prefill_has_no_drafts() -> None:
    world = World(speculative_tokens=4, draft_model=at_once(0.0))
    world.add(request("send", [1, 2], 4), kind=Kind.SEND, attempt="send")
    assert world.scheduler.queues.live["send"].drafter is None


def test_a_model_that_fails_leaves_requests_without_drafts() -> None:
    woken: list[int] = []
    model = draft_model()

    def broken(plan: Any) -> Any:
        raise RuntimeError("no device")

    model._executor.submit = broken  # type: ignore[method-assign]
    model.start(lambda: woken.append(1))
    for length in (3, 4):
        model.ask("r", list(range(length)), 2)
    model.stop(30)
    assert not model.busy and model.answer("r", 3) == model.answer("r", 4) == () and woken


def test_a_model_that_failed_is_not_asked_again() -> None:
    model = draft_model()
    model.works = False
    assert not model.ask("r", [1, 2], 2) and not model.busy


def test_the_end_is_not_lost_behind_what_is_asked() -> None:
    model, begun, go = draft_model(), threading.Event(), threading.Event()
    compute = model._compute

    def slow(asks: list[Ask]) -> None:
        begun.set()
        assert go.wait(30)
        compute(asks)

    model._compute = slow  # type: ignore[method-assign]
    model.start(lambda: None)
    model.ask("a", [1, 2], 2)
    assert begun.wait(30)
    model.ask("b", [1, 2], 2)
    model.stop(0.0)
    go.set()
    model._thread.join(30)
    assert not model._thread.is_alive() and model.answer("b", 2)


def test_ids_that_the_model_does_not_have_get_no_drafts_and_others_go_on() -> None:
    """A served model may have more ids than its tokenizer has text for, and a request may name them."""
    model = draft_model(vocab_size=50)
    submit = model._executor.submit

    def checked(plan: Any) -> Any:
        if any(max(start.token_ids) >= 50 for start in plan.starts):
            raise IndexError("outside the table")
        return submit(plan)

    model._executor.submit = checked  # type: ignore[method-assign]
    model.start(lambda: None)
    model.ask("odd", [1, 50], 2)
    model.ask("even", [1, 49], 2)
    model.stop(30)
    assert not model.busy and not model.answer("odd", 2)
    assert list(model.answer("even", 2)) == expected_tokens([1, 49], LIKELIEST, 2)


def held(world: World) -> int:
    """Turns in which a running request waited for its newest token."""
    found = 0
    while world.turn():
        found += any(seq.holds for seq in world.scheduler.queues.running)
    return found


def test_a_request_that_gets_no_drafts_waits_for_none() -> None:
    """It would be planned one step after the other for nothing: one beyond the model's length, or beside too many."""
    for count, rows, length in ((1, 5, 63), (3, 2, 10)):
        world = World(num_blocks=65, max_model_len=128, speculative_tokens=4, draft_model=draft_model(rows=rows))
        for number in range(count):
            world.add(request(f"r{number}", [number + 1] * length, 30))
        assert held(world) <= 2, f"{count} requests, {rows} rows, {length} tokens"
        assert all(len(world.tokens[f"r{number}"]) == 30 for number in range(count))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--speculative-method", "model"], "--speculative-method model and --speculative-model"),
        (["--speculative-model", "x"], "--speculative-method model and --speculative-model"),
        (["--tensor-parallel-size", "2"], "does not go with --tensor-parallel-size 2"),
        (["--executor", "fake"], "does not go with --executor fake"),
        (["--role", "prefill", "--transfer-mode", "direct"], "does not go with --role prefill"),
    ],
)
def test_what_does_not_go_with_a_draft_model_is_refused_by_name(flags: list[str], problem: str) -> None:
    both = [] if flags[0].startswith("--spec") else ["--speculative-method", "model", "--speculative-model", "x"]
    role = [] if "--role" in flags else ["--role", "unified"]
    with pytest.raises(ConfigError, match=problem):
        parse_serve([*role, "--model", "m", *both, *flags])

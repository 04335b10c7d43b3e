"""The choice as a pure function: properties over random fleets, and the cases with a name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.router.policy import (
    Choice,
    Endpoint,
    Facts,
    Load,
    PolicyName,
    Reason,
    Refusal,
    Rules,
    choose,
    fleet,
    has_room,
)


def endpoints(role):
    one = st.tuples(st.sampled_from("ab"), st.sampled_from(["direct", "store", "none"]), st.sampled_from([0, 15, 99]))
    return st.lists(one, max_size=4).map(
        lambda kinds: [Endpoint(f"{role}{i}", f, m, max_model_len=most) for i, (f, m, most) in enumerate(kinds)]
    )


loads_strategy = st.dictionaries(
    st.sampled_from([f"{r}{i}" for r in "pd" for i in range(4)]),
    st.builds(Load, st.integers(0, 5), st.integers(0, 50)),
)
rules_strategy = st.builds(
    Rules,
    policy=st.sampled_from(PolicyName),
    disaggregate_above=st.sampled_from([0, 10]),
    local_without_prefill=st.booleans(),
)


def test_a_choice_of_a_prompt_goes_where_the_prompt_is():
    engines = fleet([Endpoint("p0", "a", "direct")], [Endpoint(f"d{i}", "a", "direct") for i in range(3)])
    loads = {"d1": Load(9, 9000)}
    facts = Facts(prompt_tokens=50, max_tokens=5, turn=0, holder="d1")
    assert choose(Rules(), engines, loads, facts) == Choice(None, engines.decode[1], Reason.SHARED_PROMPT)
    for elsewhere in (replace(facts, excluded=frozenset({"d1"})), replace(facts, holder="gone")):
        got = choose(Rules(), engines, loads, elsewhere)
        assert isinstance(got, Choice) and (got.reason, got.decode.url != "d1") == (Reason.PAIR, True)


@settings(max_examples=500)
@given(
    prefill=endpoints("p"),
    decode=endpoints("d"),
    loads=loads_strategy,
    rules=rules_strategy,
    prompt=st.integers(1, 20),
    turn=st.integers(0, 100),
    excluded=st.frozensets(st.sampled_from(["p0", "p1", "d0", "d1"])),
)
def test_every_choice_is_lawful(prefill, decode, loads, rules, prompt, turn, excluded):
    facts = Facts(prompt_tokens=prompt, max_tokens=5, turn=turn, excluded=excluded)
    got = choose(rules, fleet(prefill, decode), loads, facts)
    givers = [e for e in prefill if e.url not in excluded]
    takers = [e for e in decode if e.url not in excluded]
    pairs = [
        (p, d)
        for p in givers
        for d in takers
        if (p.fingerprint, p.mode) == (d.fingerprint, d.mode) != (d.fingerprint, "none")
        and (not p.max_model_len or prompt < p.max_model_len)
    ]
    too_long = bool(prefill) and all(0 < p.max_model_len <= prompt for p in prefill)
    if isinstance(got, Refusal):
        if got is Refusal.NO_DECODE:
            assert not takers
        else:
            assert takers and not pairs and not rules.local_without_prefill and prompt > rules.disaggregate_above
            assert (got is Refusal.LONG_PROMPT) == too_long
            assert too_long or (got is Refusal.NO_PREFILL) == (not givers)
        return
    assert got.decode in takers
    if prompt <= rules.disaggregate_above:
        assert (got.prefill, got.reason) == (None, Reason.SHORT_PROMPT)
    elif pairs:
        assert (got.prefill, got.decode) in pairs and got.reason is Reason.PAIR
    else:
        reason = Reason.LONG_PROMPT if too_long else Reason.NO_PREFILL
        assert rules.local_without_prefill and (got.prefill, got.reason) == (None, reason)
    if rules.policy is PolicyName.LEAST_LOAD:
        rivals = {d for _, d in pairs} if got.reason is Reason.PAIR else set(takers)
        zero = Load()

        def key(e):
            return (loads.get(e.url, zero).tokens, loads.get(e.url, zero).requests)

        assert key(got.decode) == min(map(key, rivals))
        if got.prefill is not None:
            assert key(got.prefill) == min(key(p) for p, d in pairs if d == got.decode)


def test_equals_take_turns():
    engines = fleet([], [Endpoint(f"d{i}", "f") for i in range(3)], unified=True)
    for policy in PolicyName:
        chosen = [
            choose(Rules(policy=policy), engines, {}, Facts(prompt_tokens=5, max_tokens=5, turn=t)) for t in range(6)
        ]
        assert [c.decode.url for c in chosen] == ["d0", "d1", "d2"] * 2
        assert {c.reason for c in chosen} == {Reason.UNIFIED}


def test_large_output_limits_do_not_dominate():
    assert Facts(prompt_tokens=10, max_tokens=100_000, turn=0).decode_tokens == 266


def test_a_choice_is_a_record():
    d = Endpoint("d", "f")
    assert choose(Rules(), fleet([], [d]), {}, Facts(prompt_tokens=1, max_tokens=1, turn=0)) == Choice(
        None, d, Reason.NO_PREFILL
    )


@pytest.mark.parametrize(
    ("outstanding", "tokens", "usage", "blocks", "room"),
    [
        (0, 75, 0.0, 10, True),
        (0, 76, 0.0, 10, False),
        (25, 50, 0.0, 10, True),
        (26, 50, 0.0, 10, False),
        (0, 50, 0.25, 10, True),
        (0, 50, 0.3, 10, False),
        (25, 50, 0.25, 10, True),  # what this router has there is in the share that is used
        (0, 1, 0.0, 0, False),  # its size is not known
    ],
)
def test_prefill_begins_early_where_decode_has_room(outstanding, tokens, usage, blocks, room):
    """Three quarters of its blocks, of 10 tokens each here."""
    decode = Endpoint("d", "f", block_size=10, blocks=blocks)
    assert has_room(decode, Load(1, outstanding), tokens, usage=usage) is room

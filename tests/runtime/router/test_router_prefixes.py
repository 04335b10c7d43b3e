"""What the router knows of prefix caches: the guess, the engines' events, and both through the policy."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.kv.keys import ExtraKeys, block_hashes
from isthmus_runtime.request import GenerateRequest, SamplingParams
from isthmus_runtime.router.policy import Endpoint, Facts, Load, PolicyName, Rules, choose, fleet
from isthmus_runtime.router.prefixes import EventGap, SentPrefixes, StoredBlocks, cached_tokens, prompt_hashes

PREFIX_POLICIES = [p for p in PolicyName if p.by_prefix]


def endpoint(url, blocks=0):
    return Endpoint(url, "f", block_size=16, blocks=blocks)


def test_hashes_are_the_engines_own():
    ids = tuple(range(50))
    request = GenerateRequest(
        request_id="r", prompt_token_ids=ids, sampling=SamplingParams(max_tokens=1), cache_salt="tenant"
    )
    expected = block_hashes(ids, 16, extra=ExtraKeys(cache_salt="tenant"))
    assert prompt_hashes(request, 16) == [int.from_bytes(h[:8], "big") for h in expected] and len(expected) == 3
    other = GenerateRequest(request_id="r", prompt_token_ids=ids, sampling=SamplingParams(max_tokens=1))
    assert not set(prompt_hashes(other, 16)) & set(prompt_hashes(request, 16))


@given(
    prompts=st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 9), unique=True, max_size=8))),
    bound=st.integers(1, 6),
    asked=st.lists(st.integers(0, 9), unique=True, max_size=8),
)
def test_sent_prefixes_equal_a_plain_lru(prompts, bound, asked):
    known, reference = SentPrefixes(), {"a": [], "b": []}
    for url, hashes in prompts:
        known.sent(endpoint(url, blocks=bound), hashes)
        for h in reversed(hashes):
            if h in reference[url]:
                reference[url].remove(h)
            reference[url].append(h)
        del reference[url][: max(0, len(reference[url]) - bound)]
    for url, blocks in reference.items():
        expected = next((i for i, h in enumerate(asked) if h not in blocks), len(asked))
        assert known.hit(url, asked) == expected
    known.forget("a")
    assert known.hit("a", [1]) == 0


def test_the_end_of_a_prefix_is_forgotten_first():
    known = SentPrefixes(max_blocks=3)
    known.sent(endpoint("e"), [1, 2, 3, 4, 5])
    assert known.hit("e", [1, 2, 3, 4, 5]) == 3


@given(st.lists(st.lists(st.tuples(st.sampled_from("+-"), st.integers(0, 5)))))
def test_events_are_followed(lines):
    stored, reference, at = StoredBlocks(), set(), 7
    stored.apply("e", reset=True, previous=at, following=at, changes=())
    for line in lines:
        stored.apply(
            "e", reset=False, previous=at, following=at + len(line), changes=[f"{sign}{h:016x}" for sign, h in line]
        )
        at += len(line)
        for sign, h in line:
            (reference.add if sign == "+" else reference.discard)(h)
    for h in range(6):
        assert stored.hit("e", [h]) == (h in reference)


def test_a_gap_asks_for_a_snapshot():
    stored = StoredBlocks()
    with pytest.raises(EventGap):
        stored.apply("e", reset=False, previous=3, following=4, changes=["+01"])
    stored.apply("e", reset=True, previous=3, following=3, changes=["+01", "+02"])
    stored.apply("e", reset=False, previous=3, following=3, changes=["+03"])
    with pytest.raises(EventGap):
        stored.apply("e", reset=False, previous=4, following=5, changes=["+04"])
    assert stored.hit("e", [1, 2, 3, 4]) == 3
    stored.apply("e", reset=True, previous=9, following=9, changes=["+04"])
    assert (stored.hit("e", [1]), stored.hit("e", [4])) == (0, 1)
    with pytest.raises(ValueError, match="expected"):
        stored.apply("e", reset=False, previous=9, following=10, changes=["x05"])


@pytest.mark.parametrize("policy", PREFIX_POLICIES)
@pytest.mark.parametrize(
    ("load_of_hit", "chosen"), [(0, "d1"), (399, "d1"), (401, "d0")], ids=["idle", "worth it", "too busy"]
)
def test_a_cached_prefix_attracts_until_its_engine_is_too_busy(policy, load_of_hit, chosen):
    engines = fleet((), [endpoint("d0"), endpoint("d1")], unified=True)
    facts = Facts(prompt_tokens=120, max_tokens=5, turn=0, cached={"d1": 100})
    got = choose(Rules(policy=policy), engines, {"d1": Load(1, load_of_hit)}, facts)
    assert got.decode.url == chosen


@pytest.mark.parametrize("policy", [p for p in PolicyName if not p.by_prefix])
def test_other_policies_do_not_look_at_caches(policy):
    engines = fleet((), [endpoint("d0"), endpoint("d1")], unified=True)
    facts = Facts(prompt_tokens=120, max_tokens=5, turn=0, cached={"d1": 100})
    assert choose(Rules(policy=policy), engines, {}, facts).decode.url == "d0"


def test_both_legs_follow_their_own_cache():
    givers = [Endpoint(f"p{i}", "f", "direct", block_size=16) for i in range(2)]
    takers = [Endpoint(f"d{i}", "f", "direct", block_size=16) for i in range(2)]
    facts = Facts(prompt_tokens=120, max_tokens=5, turn=0, cached={"p1": 16, "d0": 32})
    got = choose(Rules(policy=PolicyName.KV_AWARE), fleet(givers, takers), {}, facts)
    assert (got.prefill.url, got.decode.url) == ("p1", "d0")
    assert (facts.missing("p1", 120), facts.missing("p0", 120)) == (104, 120)


def test_cached_tokens_names_only_engines_that_have_some():
    known = SentPrefixes()
    known.sent(endpoint("e0"), [1, 2])
    found = cached_tokens(known, [endpoint("e0"), endpoint("e1")], OrderedDict({16: [1, 2, 3]}))
    assert found == {"e0": 32}

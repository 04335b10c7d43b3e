"""Requests over real HTTP to fake engines: both legs, every way they fail, and that each ends exactly once."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from isthmus_runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    TransferFailed,
    error_from_json,
)
from isthmus_runtime.protocol.lines import token_line
from isthmus_runtime.request import FinishReason, Structure, TokenChunk, TokenLogprobs
from isthmus_runtime.router.attempt import Attempt
from isthmus_runtime.router.wire import CONNECT_TIMEOUT_S


def ids(chunks):
    return [i for c in chunks for i in c.token_ids]


def check_ended_once(chunks):
    assert [c.finish_reason is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]


def test_pair(rig, run, kit):
    async def main():
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        async with rig(prefill, decode) as r:
            chunks = await kit.collect(r.backend)
            check_ended_once(chunks)
            assert ids(chunks) == [7, 8, 9]
            call = decode.generates[0]
            assert (call.prefill_url, call.prefill_epoch) == (prefill.url, "e1") and call.attempt
            sent = prefill.prefills[0]
            assert (sent.attempt, sent.ticket.attempt, sent.request) == (call.attempt, call.attempt, call.request)
            assert [(c.attempt, c.ok) for c in decode.commits] == [(call.attempt, True)]
            assert decode.aborts == prefill.aborts == [] and r.idle()
            assert r.metric('isthmus_router_choices_total{model_name="m",reason="pair"}') == 1
            assert r.metric('isthmus_router_prompts_total{model_name="m",source="transferred"}') == 1
            assert r.metric("isthmus_router_requests_in_flight") == 0

    run(main())


@pytest.mark.parametrize("client", ["", "5f3a"])
def test_engines_are_told_whose_a_request_is(rig, run, kit, client):
    """Beside it: those of an older version would refuse a field."""

    async def main():
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        async with rig(prefill, decode) as r:
            await kit.collect(r.backend, replace(kit.request(), client=client))
            assert prefill.clients == decode.clients == [client or None]

    run(main())


def test_tokens_pass_one_by_one(rig, run, kit):
    async def main():
        gates = [asyncio.Event(), asyncio.Event()]
        engine = kit.Engine("unified")
        engine.local_script = [kit.tokens(1), gates[0], kit.tokens(2), gates[1], kit.done(3)]
        async with rig(engine) as r, aclosing(r.backend.generate(kit.request())) as stream:
            assert (await anext(stream)).token_ids == (1,)
            gates[0].set()
            assert (await anext(stream)).token_ids == (2,)
            gates[1].set()
            assert (await anext(stream)).finish_reason is FinishReason.STOP
            assert engine.generates[0].attempt == ""

    run(main())


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # (chunks of the engine, which arrive together; chunks downstream)
        ([((1,), {"note": "local"}), ((2,), {}), ((), {"finish_reason": FinishReason.LENGTH})], [((1, 2), "length")]),
        ([((1, 2), {"note": "local"}), ((3,), {"finish_reason": FinishReason.STOP})], [((1, 2, 3), "stop")]),
        ([((1,), {}), ((2,), {}), ((3, 4), {}), ((), {"finish_reason": FinishReason.STOP})], None),
        ([((1,), {}), ((), {"finish_reason": FinishReason.ERROR, "error": TransferFailed("x")})], None),
        ([((1,), {}), ((), {"finish_reason": FinishReason.ABORT})], None),
        ([((1,), {"logprobs": (TokenLogprobs(1, -0.5),)}), ((2,), {"logprobs": (TokenLogprobs(2, -0.1),)}),
          ((), {"finish_reason": FinishReason.STOP})], None),
    ],
)  # fmt: skip
def test_lines_that_are_here_together_are_one_chunk_where_they_can_be(rig, run, kit, lines, expected):
    async def main():
        engine = kit.Engine("unified")
        sent = [TokenChunk(token_ids=tokens, **more) for tokens, more in lines]
        engine.local_script = [b"".join(map(token_line, sent))]
        async with rig(engine) as r:
            chunks = await kit.collect(r.backend)
            check_ended_once(chunks)
            assert ids(chunks) == ids(sent) and chunks[-1].finish_reason is sent[-1].finish_reason
            assert [e for c in chunks for e in c.logprobs] == [e for c in sent for e in c.logprobs]
            assert [c.note for c in chunks if c.note] == [c.note for c in sent if c.note]
            assert (chunks[-1].error is None) is (sent[-1].error is None)
            if expected is not None:
                assert [(c.token_ids, c.finish_reason.value) for c in chunks] == expected
            await kit.collect(r.backend)  # the connection is in order
            assert r.idle() and len(engine.generates) == 2 and engine.aborts == []

    run(main())


def test_the_names_of_vllm_count_each_request_as_its_client_sees_it(rig, run, kit):
    def seen(r):
        return [int(r.metric(f"vllm:num_requests_{state}")) for state in ("waiting", "running")]

    async def main():
        reserve, gate = asyncio.Event(), asyncio.Event()
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        prefill.prefill_script = [reserve]
        prefill.prefill_hits = 2
        decode.script = [kit.tokens(7, note="transferred"), gate, kit.done(9)]
        async with rig(prefill, decode) as r:
            async with aclosing(r.backend.generate(kit.request())) as stream:
                first = asyncio.ensure_future(anext(stream))
                await prefill.started.wait()
                assert seen(r) == [1, 0]
                assert r.metric("vllm:prefix_cache_queries_total") == 0
                reserve.set()
                await first
                assert seen(r) == [0, 1]
                gate.set()
                await anext(stream)
            assert seen(r) == [0, 0]
            assert r.metric("vllm:prefix_cache_queries_total") == len(kit.request().prompt_token_ids)
            assert r.metric("vllm:prefix_cache_hits_total") == 2

            decode.before = [Overloaded("full")]
            with pytest.raises(Overloaded):
                await kit.collect(r.backend)
            assert seen(r) == [0, 0]

    run(main())


def test_choices_of_one_prompt_follow_the_first(rig, run, kit):
    async def main():
        prefill, decodes = kit.Engine("prefill"), [kit.Engine("decode") for _ in range(3)]
        async with rig(prefill, *decodes, policy="round-robin") as r:
            await kit.collect(r.backend)
            for name in "abc":
                request = replace(kit.request(request_id=name), prompt_group="g")
                check_ended_once(await kit.collect(r.backend, request))
            (used,) = [d for d in decodes if any(call.request.request_id == "a" for call in d.generates)]
            mine = [call for call in used.generates if call.request.request_id in ("a", "b", "c")]
            assert [bool(call.attempt) for call in mine] == [True, False, False]
            assert [call.request.request_id for call in prefill.prefills] == ["r1", "a"]
            assert r.metric('isthmus_router_choices_total{model_name="m",reason="shared-prompt"}') == 2

    run(main())


def test_the_first_of_several_choices_does_not_begin_before_its_reservation(rig, run, kit):
    """The others begin with its first token, and are to find the prompt's KV at decode: prefill's word is earlier."""

    async def main():
        prefill, decode = pair_that_begins_early(kit)
        async with rig(prefill, decode) as r:
            check_ended_once(await kit.collect(r.backend))
            check_ended_once(await kit.collect(r.backend, replace(kit.request(request_id="a"), prompt_group="g")))
            assert [(call.request.request_id, call.ticket is None) for call in prefill.prefills] == [
                ("r1", True),
                ("a", False),
            ]

    run(main())


@pytest.mark.parametrize("length", [1, 5000])
def test_log_probabilities_of_a_prompt_come_from_whoever_computed_it(rig, run, kit, length):
    scores = tuple(TokenLogprobs(i, float("-inf"), ((9, -0.5), (i, float("-inf"))), 77) for i in range(length))

    async def main():
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        prefill.prefill_scores = scores
        decode.local_script = [TokenChunk((7,), note="local", prompt_logprobs=scores[::2]), kit.done(8)]
        async with rig(prefill, decode, disaggregate_above=50) as r:
            for prompt, expected in ((range(51), scores), (range(50), scores[::2])):
                first, *others = await kit.collect(r.backend, kit.request(prompt))
                assert first.prompt_logprobs == expected
                assert not any(chunk.prompt_logprobs for chunk in others)

    run(main())


def test_short_prompts_skip_prefill(rig, run, kit):
    async def main():
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        async with rig(prefill, decode, disaggregate_above=100) as r:
            await kit.collect(r.backend, kit.request(range(100)))
            assert (decode.generates[0].attempt, prefill.prefills) == ("", [])
            await kit.collect(r.backend, kit.request(range(101)))
            assert len(prefill.prefills) == 1

    run(main())


@pytest.mark.parametrize("how", ["refuses", "breaks", "dies", "stops", "overloaded"])
def test_failing_prefill_is_told_to_decode(rig, run, kit, how):
    """Another prefill engine does not exist: decode goes on by its own setting."""

    async def main():
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        never = asyncio.Event()
        prefill.prefill_script = {
            "refuses": [InvalidRequest("too long for me")],
            "overloaded": [Overloaded("draining")],
            "breaks": [TransferFailed("peer gone", stage="SENDING")],
            "dies": [kit.DIE],
            "stops": [never],
        }[how]
        async with rig(prefill, decode, dead_after_s=0.4) as r:
            if how == "stops":
                prefill.frozen = never
            chunks = await kit.collect(r.backend)
            check_ended_once(chunks)
            assert chunks[0].note == "recomputed" and ids(chunks) == [7, 8, 9]
            commit = decode.commits[0]
            assert (commit.ok, commit.stage) == (False, "SENDING" if how == "breaks" else "prefill") and commit.reason
            assert len(decode.generates) == 1 and r.idle()
            assert r.metric("isthmus_router_leg_failures_total") == 1
            never.set()

    run(main())


def test_failed_transfer_keeps_status_stage_and_attempt(rig, run, kit):
    async def main():
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        prefill.prefill_script = [TransferFailed("peer gone", stage="SENDING")]
        decode.on_failed_commit = [
            kit.done(reason=FinishReason.ERROR, error=TransferFailed("no KV", stage="SENDING", attempt="a1"))
        ]
        async with rig(prefill, decode) as r:
            with pytest.raises(TransferFailed) as caught:
                await kit.collect(r.backend)
            assert (caught.value.stage, caught.value.attempt, caught.value.status) == ("SENDING", "a1", 502)
            assert r.idle() and len(decode.generates) == 1

    run(main())


@pytest.mark.parametrize("how", ["overloaded", "dies"])
def test_prefill_that_cannot_is_replaced_by_another(rig, run, kit, how):
    async def main():
        bad, good, decode = kit.Engine("prefill"), kit.Engine("prefill"), kit.Engine("decode")
        bad.prefill_script = [Overloaded("draining") if how == "overloaded" else kit.DIE]
        async with rig(bad, good, decode, policy="round-robin") as r:
            for i in range(2):  # one of the two meets the bad one first
                chunks = await kit.collect(r.backend, kit.request(request_id=f"r{i}"))
                check_ended_once(chunks)
                assert chunks[0].note == "transferred"
                await r.until_ready()
            assert len(bad.prefills) == 1 and len(good.prefills) == 2
            first, second, third = (c.attempt for c in decode.generates)
            assert len({first, second, third}) == 3
            failed = bad.prefills[0].attempt
            await decode.until(lambda d: [a.attempt for a in d.aborts] == [failed])
            assert all(c.ok for c in decode.commits) and failed not in [c.attempt for c in decode.commits]
            assert r.metric("isthmus_router_retries_total") == 1 and r.idle()

    run(main())


@pytest.mark.parametrize("how", ["refuses", "dies before", "dies after reserving"])
def test_decode_that_cannot_is_replaced_once(rig, run, kit, how):
    async def main():
        prefill, bad, good = kit.Engine("prefill"), kit.Engine("decode"), kit.Engine("decode")
        if how == "dies after reserving":
            bad.script = [kit.DIE]
        else:
            bad.before = [Overloaded("full", status=429) if how == "refuses" else kit.DIE]
        async with rig(prefill, bad, good, policy="round-robin") as r:
            for i in range(2):
                chunks = await kit.collect(r.backend, kit.request(request_id=f"r{i}"))
                check_ended_once(chunks)
                await r.until_ready()
            assert len(bad.generates) == 1 and len(good.generates) == 2 and r.idle()

    run(main())


def test_all_decodes_refuse(rig, run, kit):
    async def main():
        engines = [kit.Engine("decode"), kit.Engine("decode"), kit.Engine("decode")]
        for e in engines:
            e.before = [Overloaded("full", status=429, retry_after_s=7)]
        async with rig(*engines) as r:
            with pytest.raises(Overloaded) as caught:
                await kit.collect(r.backend)
            assert (caught.value.status, caught.value.retry_after_s) == (429, 7)
            assert sum(len(e.generates) for e in engines) == 2  # one retry, not more
            assert r.idle()

    run(main())


def test_client_errors_are_not_retried(rig, run, kit):
    async def main():
        engines = [kit.Engine("decode"), kit.Engine("decode")]
        for e in engines:
            e.before = [InvalidRequest("bad", param="prompt")]
        async with rig(*engines) as r:
            with pytest.raises(InvalidRequest) as caught:
                await kit.collect(r.backend)
            assert caught.value.param == "prompt"
            assert sum(len(e.generates) for e in engines) == 1

    run(main())


@pytest.mark.parametrize(("prefill_hits", "decode_hits", "counted"), [(48, 16, 48), (16, 48, 48), (0, 0, 0)])
def test_cached_tokens_are_the_longer_hits_of_both_legs(rig, run, kit, prefill_hits, decode_hits, counted):
    async def main():
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        prefill.prefill_hits = prefill_hits
        decode.script = [kit.tokens(7, note="transferred", cached_tokens=decode_hits), kit.done(8)]
        async with rig(prefill, decode) as r:
            chunks = await kit.collect(r.backend)
            assert [chunk.cached_tokens for chunk in chunks] == [counted, *[0] * (len(chunks) - 1)]

    run(main())


def test_a_prompt_that_decode_computed_counts_no_hits_of_prefill(rig, run, kit):
    async def main():
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        prefill.prefill_hits = 48
        decode.script = decode.on_failed_commit
        async with rig(prefill, decode) as r:
            assert (await kit.collect(r.backend))[0].cached_tokens == 0

    run(main())


@pytest.mark.parametrize("how", ["freezes", "dies"])
def test_decode_lost_before_the_first_token_is_502_naming_stage_and_attempt(rig, run, kit, how):
    async def main():
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        never = asyncio.Event()
        decode.script = [kit.DIE if how == "dies" else never]
        async with rig(prefill, decode, dead_after_s=0.4) as r:
            work = asyncio.create_task(kit.collect(r.backend))
            await decode.until(lambda d: d.commits)
            if how == "freezes":
                decode.frozen = never
            with pytest.raises(EngineFailed, match="was lost") as caught:
                await work
            error = caught.value
            assert (error.status, error.stage, error.code) == (502, "decode", "engine_lost")
            assert error.attempt in {call.attempt for call in decode.generates} and r.idle()
            # It survives the hop through another process's JSON.
            assert type(error_from_json(error.status, error.to_json())) is type(error)
            never.set()

    run(main())


def test_a_leg_that_was_cancelled_is_no_failed_leg(rig, run, kit):
    async def main():
        engine = kit.Engine("unified")
        engine.before = [Cancelled("aborted by the router")]
        async with rig(engine) as r:
            with pytest.raises(Cancelled):
                await kit.collect(r.backend)
            assert r.metric("isthmus_router_leg_failures_total") == 0

    run(main())


def test_decode_dies_in_mid_stream(rig, run, kit):
    async def main():
        prefill, decode, spare = kit.Engine("prefill"), kit.Engine("decode"), kit.Engine("decode")
        for d in (decode, spare):
            d.script = [kit.tokens(7), kit.DIE]
        async with rig(prefill, decode, spare) as r:
            chunks = await kit.collect(r.backend)
            check_ended_once(chunks)
            assert ids(chunks) == [7]
            assert chunks[-1].finish_reason is FinishReason.ERROR
            assert isinstance(chunks[-1].error, EngineFailed) and "was lost" in chunks[-1].error.message
            assert len(decode.generates) + len(spare.generates) == 1  # tokens were delivered: no retry
            assert r.idle()

    run(main())


def test_decode_ends_without_a_finish(rig, run, kit):
    async def main():
        engine = kit.Engine("unified")
        engine.local_script = [kit.tokens(7)]
        async with rig(engine) as r:
            chunks = await kit.collect(r.backend)
            assert "closed the stream without an end" in chunks[-1].error.message

    run(main())


@pytest.mark.parametrize("when", ["before the reservation", "in mid-stream"])
def test_stopped_decode_is_noticed(rig, run, kit, when):
    """SIGSTOP: connections stay open, nothing moves, only the probes tell."""

    async def main():
        never = asyncio.Event()
        decode = kit.Engine("decode")
        if when == "in mid-stream":
            decode.local_script = [kit.tokens(7), never]
        else:
            decode.before = [never]
        async with rig(decode, dead_after_s=0.4) as r:
            work = asyncio.create_task(kit.collect(r.backend))
            await decode.started.wait()
            decode.frozen = never
            if when == "in mid-stream":
                chunks = await work
                check_ended_once(chunks)
                error = chunks[-1].error
            else:
                with pytest.raises(EngineFailed) as caught:
                    await work
                error = caught.value
            assert "it answered nothing for" in error.message
            assert r.idle()
            never.set()

    run(main())


@pytest.mark.parametrize("role", ["unified", "decode"])
def test_requests_wait_for_an_engine_that_is_on_its_way(rig, run, kit, role):
    """As when the only engine restarts, or between the last old and the first new one of a rollout."""

    async def main():
        engine = kit.Engine(role)
        async with rig(engine, gap_s=60.0) as r:
            engine.is_ready = False
            await r.until(lambda p: not p.fleet.decode)
            waiting = [asyncio.create_task(kit.collect(r.backend, kit.request(request_id=f"r{i}"))) for i in range(3)]
            left = asyncio.create_task(kit.collect(r.backend, kit.request(request_id="left")))
            await asyncio.sleep(0)
            left.cancel()
            engine.is_ready = True
            for chunks in await asyncio.gather(*waiting):
                check_ended_once(chunks)
                assert chunks[-1].finish_reason is FinishReason.STOP
            assert len(engine.generates) == 3 and r.idle()

    run(main())


def test_engines_that_cannot_be_reached_are_no_tries(rig, run, kit):
    """Two of three ended in the second since they were last asked."""

    async def main():
        engines = [kit.Engine("unified") for _ in range(3)]
        async with AsyncExitStack() as stack, AsyncExitStack() as gone:
            for engine in engines[:2]:
                await gone.enter_async_context(engine.serve())
            await stack.enter_async_context(engines[2].serve())
            settings = {"gap_s": 60.0, "discovery_interval_s": 3600.0, "policy": "round-robin"}
            r = await stack.enter_async_context(rig(*engines, served=False, **settings))
            await gone.aclose()
            for turn in range(3):
                check_ended_once(await kit.collect(r.backend, kit.request(request_id=f"r{turn}")))
            assert len(engines[2].generates) == 3 and r.idle()

    run(main())


def test_nobody_waits_for_engines_that_are_not_there(rig, run, kit):
    """Prefill scaled to 0: no pod is listed, so nothing would change the answer."""

    async def main():
        async with rig(kit.Engine("decode"), gap_s=60.0, on_prefill_unavailable="reject") as r:
            with pytest.raises(Overloaded, match="no prefill engine") as caught:
                await asyncio.wait_for(kit.collect(r.backend), 30)
            assert caught.value.status == 503 and caught.value.retry_after_s

    run(main())


def test_a_gap_that_lasts_ends_the_wait(rig, run, kit):
    async def main():
        engine = kit.Engine("unified")
        async with rig(engine, gap_s=0.05) as r:
            engine.is_ready = False
            await r.until(lambda p: not p.fleet.decode)
            with pytest.raises(Overloaded, match="no decode engine"):
                await kit.collect(r.backend)
            assert r.metric("isthmus_router_refusals_total") == 1 and r.idle()

    run(main())


def test_deadline(rig, run, kit):
    async def main():
        never = asyncio.Event()
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        prefill.prefill_script = [never]
        async with rig(prefill, decode) as r:
            # One that is not reached yet has nothing to cancel: on a machine that stands still that takes its time.
            timeout_s = 0.2
            while not prefill.prefills:
                timeout_s *= 2
                with pytest.raises(DeadlineExceeded, match=f"within {timeout_s:g} s"):
                    await kit.collect(r.backend, kit.request(timeout_s=timeout_s))
            await decode.until(lambda d: d.cancelled == len(d.generates) and d.aborts)
            await prefill.until(lambda p: p.cancelled == len(p.prefills))
            assert r.idle()

    run(main())


@pytest.mark.parametrize("stage", ["queued", "prefill", "streaming"])
def test_client_leaves(rig, run, kit, stage):
    """Both engines are told at once, wherever the request is."""

    async def main():
        never = asyncio.Event()
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        if stage == "queued":
            decode.before = [never]
        elif stage == "prefill":
            prefill.prefill_script = [never]
        else:
            decode.script = [kit.tokens(7), never]
        async with rig(prefill, decode) as r:
            if stage == "streaming":
                async with aclosing(r.backend.generate(kit.request())) as stream:
                    await anext(stream)
            else:
                work = asyncio.create_task(kit.collect(r.backend))
                await (decode if stage == "queued" else prefill).started.wait()
                work.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await work
            await decode.until(lambda d: d.cancelled == 1 and len(d.aborts) == 1)
            assert decode.aborts[0].attempt == decode.generates[0].attempt
            if stage == "prefill":
                await prefill.until(lambda p: p.cancelled == 1 and len(p.aborts) == 1)
                assert decode.commits == []
            else:
                assert prefill.cancelled == 0 and prefill.aborts == []
            assert r.idle() and r.metric("isthmus_router_requests_in_flight") == 0

    run(main())


def test_a_commit_that_is_not_accepted_ends_the_request(rig, run, kit):
    """Decode would wait for its transfer timeout otherwise."""

    async def main():
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        decode.commit_error = InvalidRequest("attempt unknown")
        async with rig(prefill, decode) as r:
            with pytest.raises(InvalidRequest, match="attempt unknown"):
                await kit.collect(r.backend)
            await decode.until(lambda d: d.cancelled == 1 and d.aborts)
            assert r.idle()

    run(main())


def test_decode_failure_cancels_prefill(rig, run, kit):
    async def main():
        never = asyncio.Event()
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        prefill.prefill_script = [never]
        async with rig(prefill, decode) as r:
            work = asyncio.create_task(kit.collect(r.backend))
            await prefill.started.wait()
            for answer in decode._commit_of.values():
                answer.set_exception(TransferFailed("reservation timed out", stage="RECEIVING"))
            with pytest.raises(EngineFailed):
                await work
            await prefill.until(lambda p: p.cancelled == 1 and p.aborts)
            assert r.idle()

    run(main())


def test_queue_limit(rig, run, kit):
    async def main():
        never = asyncio.Event()
        engine = kit.Engine("unified")
        engine.local_script = [kit.tokens(1), never]
        async with rig(engine, max_queue=1) as r, aclosing(r.backend.generate(kit.request())) as held:
            await anext(held)
            with pytest.raises(Overloaded, match="--max-queue") as caught:
                await kit.collect(r.backend)
            assert caught.value.status == 429 and caught.value.retry_after_s
            assert len(engine.generates) == 1

    run(main())


@asynccontextmanager
async def three_each(rig, kit, pause=lambda: None):
    """Nine requests that go on, begun before `pause` is called: each of three engines gets three. Entered after their
    end."""
    engines = [kit.Engine("unified") for _ in range(3)]
    for e in engines:
        e.local_script = [asyncio.Event()]
    async with rig(*engines) as r, asyncio.TaskGroup() as group:
        works = [group.create_task(kit.collect(r.backend, kit.request(request_id=f"r{i}"))) for i in range(9)]
        await asyncio.sleep(0)
        pause()
        for e in engines:
            await e.until(lambda e: len(e.generates) == 3)
        for w in works:
            w.cancel()
        await asyncio.wait(works)
        yield r


def test_load_spreads(rig, run, kit):
    async def main():
        async with three_each(rig, kit) as r:
            assert r.idle()

    run(main())


def test_a_router_that_stood_still_blames_no_engine(rig, run, kit):
    """Its time to connect is over when it runs again, and so is the wait: all engines have accepted meanwhile."""

    async def main():
        async with three_each(rig, kit, lambda: time.sleep(1.5 * CONNECT_TIMEOUT_S)) as r:
            assert r.metric("isthmus_router_leg_failures_total") == 0

    run(main())


def test_a_request_leaves_nothing_for_the_garbage_collector(kit, rig, run):
    """An attempt that refers to itself keeps its prompt until the collector comes by: memory, and 5% of the CPU."""

    async def main():
        async with rig(kit.Engine("prefill"), kit.Engine("decode")) as r:
            await kit.collect(r.backend)
            gc.collect()
            gc.disable()
            try:
                for number in range(5):
                    assert [c.token_ids for c in await kit.collect(r.backend, kit.request(request_id=f"r{number}"))]
                return [found for found in gc.get_objects() if type(found) is Attempt]
            finally:
                gc.enable()

    assert run(main()) == []


# ------------------------------------------------------------------------------------- prefill beside the reservation


def pair_that_begins_early(kit, **more):
    prefill, decode = kit.Engine("prefill", **more), kit.Engine("decode", **more)
    prefill.begins_early = decode.begins_early = True
    return prefill, decode


def test_prefill_begins_beside_the_reservation_and_tells_the_first_token(rig, run, kit):
    """The client has it while decode still waits for the KV; decode's repetition is not passed on."""

    async def main():
        prefill, decode = pair_that_begins_early(kit)
        reserve, sent = asyncio.Event(), asyncio.Event()
        decode.before, prefill.prefill_script, prefill.prefill_hits = [reserve], [sent], 32
        prefill.early_script = [kit.tokens(7, cached_tokens=32)]
        async with rig(prefill, decode) as r:
            chunks, came = [], asyncio.Event()

            def take(chunk):
                chunks.append(chunk)
                came.set()
                return True

            task = asyncio.create_task(r.backend.push(kit.request(), take))
            await prefill.until(lambda e: e.prefills)
            assert prefill.prefills[0].ticket is None and not chunks and not prefill.tickets
            reserve.set()
            await came.wait()
            assert ids(chunks) == [7] and chunks[0].cached_tokens == 32 and not decode.commits
            sent.set()
            await task
            check_ended_once(chunks)
            assert ids(chunks) == [7, 8, 9]
            attempt = decode.generates[0].attempt
            assert [t.attempt for t in prefill.tickets] == [attempt]
            assert [(c.attempt, c.ok, c.first_token) for c in decode.commits] == [(attempt, True, 7)]
            assert decode.aborts == prefill.aborts == [] and r.idle()
            assert r.metric('isthmus_router_prompts_total{model_name="m",source="transferred"}') == 1

    run(main())


def test_a_first_token_with_its_log_probabilities_comes_once(rig, run, kit):
    async def main():
        prefill, decode = pair_that_begins_early(kit)
        scored = [TokenLogprobs(token, -0.5, ()) for token in (7, 8, 9)]
        prefill.early_script = [kit.tokens(7, logprobs=(scored[0],))]
        first = TokenChunk(token_ids=(7, 8), logprobs=tuple(scored[:2]), note="transferred")
        decode.script = [first, TokenChunk((9,), (scored[2],), FinishReason.STOP)]
        async with rig(prefill, decode) as r:
            chunks = await kit.collect(r.backend)
            assert ids(chunks) == [7, 8, 9]
            assert [score for chunk in chunks for score in chunk.logprobs] == scored

    run(main())


@pytest.mark.parametrize("old", ["prefill", "decode"])
def test_engines_of_an_older_version_are_asked_one_after_the_other(rig, run, kit, old):
    async def main():
        prefill, decode = pair_that_begins_early(kit)
        (prefill if old == "prefill" else decode).begins_early = False
        async with rig(prefill, decode) as r:
            assert ids(await kit.collect(r.backend)) == [7, 8, 9]
            assert prefill.prefills[0].ticket is not None and not prefill.tickets
            assert decode.commits[0].first_token is None

    run(main())


@pytest.mark.parametrize("why", ["others", "full", "scores", "structure", "choices"])
def test_who_waits_for_decode_s_word_all_the_same(rig, run, kit, why):
    """Decode has no room as far as the router knows (docs/adr/0006), or more than a token comes with the first, or
    other choices of the prompt begin with its first token, and would not find its KV at decode."""

    async def main():
        prefill, decode = pair_that_begins_early(kit)
        decode.kv_usage = 0.5 if why == "others" else 0.0
        wanted = kit.request(range(130 if why == "full" else 100))
        if why == "scores":
            wanted = replace(wanted, sampling=replace(wanted.sampling, prompt_logprobs=0))
        if why == "structure":
            wanted = replace(wanted, structure=Structure(kind="regex", text="a"))
        if why == "choices":
            wanted = replace(wanted, prompt_group="a")
        async with rig(prefill, decode) as r:
            assert ids(await kit.collect(r.backend, wanted)) == [7, 8, 9]
            assert prefill.prefills[0].ticket is not None

    run(main())


@pytest.mark.parametrize("how", ["fails", "dies"])
@pytest.mark.parametrize("told", [False, True])
def test_prefill_that_fails_after_it_began_early_is_told_to_decode(rig, run, kit, how, told):
    """With the first token, where the client has it: decode computes the prompt and goes on from there."""

    async def main():
        prefill, decode = pair_that_begins_early(kit)
        error = TransferFailed("no bytes", stage="sending", attempt="x")
        end = kit.DIE if how == "dies" else kit.done(reason=FinishReason.ERROR, error=error)
        if told:
            prefill.prefill_script = [end]
        else:
            prefill.early_script = [end]
        async with rig(prefill, decode) as r:
            chunks = await kit.collect(r.backend)
            check_ended_once(chunks)
            assert ids(chunks) == [7, 8, 9]
            (commit,) = decode.commits
            assert (commit.ok, commit.first_token) == (False, 7 if told else None)
            assert r.idle()
            assert r.metric('isthmus_router_prompts_total{model_name="m",source="recomputed"}') == 1

    run(main())


def test_prefill_that_fails_before_decode_reserved_is_not_told_too_soon(rig, run, kit):
    """Decode would not know what the word is about, and wait for KV until its deadline."""

    async def main():
        prefill, decode = pair_that_begins_early(kit)
        reserve = asyncio.Event()
        decode.before, prefill.early_script = [reserve], [kit.DIE]
        async with rig(prefill, decode) as r:
            task = asyncio.create_task(kit.collect(r.backend))
            await prefill.until(lambda e: e.cancelled)
            assert not decode.commits
            reserve.set()
            assert ids(await task) == [7, 8, 9]
            assert [commit.ok for commit in decode.commits] == [False]

    run(main())


def test_prefill_that_waits_no_longer_for_decode_is_asked_again_with_the_ticket(rig, run, kit):
    async def main():
        prefill, decode = pair_that_begins_early(kit)
        decode.before = [reserve := asyncio.Event()]
        late = Overloaded("decode has not reserved within 1 s after the prompt was computed")
        prefill.early_script = [kit.done(reason=FinishReason.ERROR, error=late)]
        async with rig(prefill, decode) as r:
            task = asyncio.create_task(kit.collect(r.backend))
            await prefill.until(lambda e: e.prefills)
            reserve.set()
            chunks = await task
            check_ended_once(chunks)
            assert ids(chunks) == [7, 8, 9]
            assert [call.ticket is None for call in prefill.prefills] == [True, False]
            assert len({call.attempt for call in prefill.prefills}) == 1
            assert [(c.ok, c.first_token) for c in decode.commits] == [(True, None)] and r.idle()

    run(main())


@pytest.mark.parametrize("how", ["refuses", "dies"])
def test_a_decode_that_does_not_reserve_ends_the_prefill_that_began(rig, run, kit, how):
    async def main():
        prefill, decode = pair_that_begins_early(kit)
        other = kit.Engine("decode")
        began = asyncio.Event()
        decode.before = [began, kit.DIE if how == "dies" else Overloaded("full", status=429)]
        async with rig(prefill, decode, other, policy="round-robin") as r:
            tasks = [asyncio.create_task(kit.collect(r.backend, kit.request(request_id=f"r{i}"))) for i in range(2)]
            await prefill.until(lambda e: len(e.prefills) == 2)
            began.set()
            for task in tasks:
                chunks = await task
                check_ended_once(chunks)
                assert ids(chunks) == [7, 8, 9]
            (early,) = [call.attempt for call in prefill.prefills if call.ticket is None]
            await prefill.until(lambda e: early in [call.attempt for call in e.aborts])
            assert r.idle()

    run(main())


def test_decode_that_dies_after_prefill_told_the_first_token_ends_the_stream(rig, run, kit):
    async def main():
        prefill, decode = pair_that_begins_early(kit)
        decode.script = [kit.DIE]
        async with rig(prefill, decode) as r:
            chunks = await kit.collect(r.backend)
            check_ended_once(chunks)
            assert ids(chunks) == [7] and chunks[-1].error.stage == "decode" and r.idle()

    run(main())


@pytest.mark.parametrize("note", ["transferred", ""])
def test_another_first_token_than_the_client_has_is_an_error(rig, run, kit, note):
    """Counted, and with its place, in whatever form its line comes."""

    async def main():
        prefill, decode = pair_that_begins_early(kit)
        prefill.early_script = [kit.tokens(6)]
        decode.script = [kit.tokens(7, note=note), kit.tokens(8), kit.done(9)]
        async with rig(prefill, decode) as r:
            chunks = await kit.collect(r.backend)
            check_ended_once(chunks)
            assert ids(chunks) == [6] and "has 7 for the first token" in chunks[-1].error.message
            assert chunks[-1].error.stage == "decode" and chunks[-1].error.attempt
            assert r.metric("isthmus_router_leg_failures_total") == 1
            assert r.idle()

    run(main())


@pytest.mark.parametrize("stage", ["before the ticket", "after the first token"])
def test_a_client_that_leaves_ends_both_legs(rig, run, kit, stage):
    async def main():
        prefill, decode = pair_that_begins_early(kit)
        never = asyncio.Event()
        decode.before = [never] if stage == "before the ticket" else []
        prefill.prefill_script = [never]
        async with rig(prefill, decode) as r:
            chunks = []

            def take(chunk):
                chunks.append(chunk)
                return True

            task = asyncio.create_task(r.backend.push(kit.request(), take))
            if stage == "before the ticket":
                await prefill.until(lambda e: e.prefills)
                await decode.until(lambda e: e.generates)
            else:
                await prefill.until(lambda e: e.tickets)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await prefill.until(lambda e: e.cancelled)
            await decode.until(lambda e: e.cancelled)
            assert r.idle()

    run(main())

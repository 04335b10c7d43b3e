"""Tenants: whose key it is, what each may ask for, and a file that changes while requests run."""

import asyncio
import json
import os

import aiohttp
import openai
import pytest
from api_calls import HELLO, client, spell
from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.errors import ConfigError
from isthmus_runtime.openai.tenants import Tenant, TokenBucket, parse_tenants
from isthmus_runtime.openai.tenants_file import TenantsFile

REQUESTS = 'isthmus_router_tenant_requests_total{{model_name="tiny",status="{}",tenant="team-a"}}'
A, B = "key-of-team-a-0001", "key-of-team-b-0001"


def write(path, *tenants):
    made = path.with_suffix(".new")
    made.write_text(json.dumps({"tenants": tenants}))
    os.replace(made, path)
    return path


def a(**limits):
    return {"name": "team-a", "keys": [A], **limits}


def b(**limits):
    return {"name": "team-b", "keys": [B], **limits}


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def tenants(serve, tokenizer, tmp_path):
    def start(*entries, clock, **more):
        path = write(tmp_path / "tenants.json", *entries)
        return serve(spell(tokenizer, "x"), tenants=TenantsFile(str(path), clock()), clock=clock, **more)

    return start


def ask(api_client, **more):
    return api_client.chat.completions.create(model="tiny", messages=HELLO, **more)


def test_a_key_is_that_of_its_tenant_alone(tenants, run):
    async def main():
        async with tenants(a(), b(hideCachedTokens=True), clock=Clock()) as api:
            async with client(api, key=A) as one, client(api, key=B) as two, client(api, key="nobody's key") as none:
                with pytest.raises(openai.AuthenticationError):
                    await ask(none)
                with pytest.raises(openai.AuthenticationError):
                    await none.models.list()
                shown = await ask(one)
                hidden = await ask(two)
                assert shown.usage.prompt_tokens_details.cached_tokens == 3
                assert hidden.usage.prompt_tokens_details.cached_tokens == 0
                await ask(two, extra_body={"cache_salt": "mine"})
                await ask(one, extra_body={"cache_salt": "mine"})
            salts = [r.cache_salt for r in api.backend.requests]
            assert len(set(salts)) == 4, "each tenant has caches of its own, whatever it sends"
            assert (
                api.metric('isthmus_router_tenant_requests_total{model_name="tiny",status="200",tenant="team-a"}') == 2
            )
            assert api.metric('isthmus_router_tenant_tokens_total{kind="generation",model_name="tiny",tenant="team-b"}')
            assert not api.metric("team") and all(key not in api.text() for key in (A, B))

    run(main())


def test_priority_is_bounded_by_the_tenant(tenants, run):
    async def main():
        async with tenants(a(), b(priority=-5), clock=Clock()) as api:
            for key, priority in ((A, -(2**31)), (A, 7), (B, -100), (B, -3)):
                async with client(api, key=key) as c:
                    await ask(c, extra_body={"priority": priority})
            assert [r.priority for r in api.backend.requests] == [0, 7, -5, -3]

    run(main())


def test_rate_is_that_of_the_tenant_and_not_of_a_key(tenants, run):
    clock = Clock()

    async def main():
        other = "another-key-of-team-a"
        entry = {**a(requestsPerSecond=0.5, burst=2), "keys": [A, other]}
        async with tenants(entry, b(), clock=clock) as api:
            async with client(api, key=A) as one, client(api, key=other) as same, client(api, key=B) as two:
                await ask(one)
                await ask(same)
                with pytest.raises(openai.RateLimitError) as error:
                    await ask(one)
                assert error.value.response.headers["retry-after"] == "2" and "team-a may send 0.5" in str(error.value)
                await ask(two)
                clock.now += 2.0
                await ask(same)
                with pytest.raises(openai.RateLimitError):
                    await ask(one)
            assert (
                api.metric('isthmus_router_tenant_requests_total{model_name="tiny",status="429",tenant="team-a"}') == 2
            )

    run(main())


def test_what_needs_no_engine_counts_against_the_rate_too(tenants, run):
    async def main():
        ask = {"messages": HELLO}
        headers = {"x-api-key": A}
        for path, body in (
            ("/tokenize", ask),
            ("/detokenize", {"tokens": [1]}),
            ("/v1/messages/count_tokens", ask),
        ):
            async with tenants(a(requestsPerSecond=0.5, burst=1), clock=Clock()) as api:
                async with aiohttp.ClientSession(api.url, headers=headers) as http:
                    answers = [(await http.post(path, json=body)).status for _ in range(2)]
                assert answers == [200, 429], path

    run(main())


def test_generations_in_flight_are_bounded_and_n_with_them(tokenizer, serve, tmp_path, run):
    async def main():
        go = asyncio.Event()
        path = write(tmp_path / "t.json", a(concurrency=3), b())
        file = TenantsFile(str(path), 1000.0)

        def script(request):
            return [go, *spell(tokenizer, "x")(request)]

        async with serve(script, tenants=file, clock=Clock()) as api, client(api, A) as one, client(api, B) as two:
            with pytest.raises(openai.BadRequestError, match="n: 4 generations in one request"):
                await ask(one, n=4)
            running = asyncio.create_task(ask(one, n=2))
            await api.backend.started.wait()
            with pytest.raises(openai.RateLimitError, match="team-a has 2 generations in flight and may have 3"):
                await ask(one, n=2)
            others = asyncio.create_task(ask(two, n=4))
            go.set()
            assert len((await running).choices) == 2 and len((await others).choices) == 4
            assert len((await ask(one, n=3)).choices) == 3, "what ended is no longer counted"

    run(main())


def test_a_changed_file_is_read_again_and_a_wrong_one_changes_nothing(tmp_path, caplog):
    path = write(tmp_path / "t.json", a())
    file = TenantsFile(str(path), 0.0)
    use = file.tenants
    write(path, a(), b())
    file.refresh(1.0)
    assert use.of_key(B.encode()) is None, "looked a moment ago"
    file.refresh(10.0)
    assert use.of_key(B.encode()).name == "team-b"
    path.write_text("{")
    file.refresh(20.0)
    file.refresh(30.0)
    assert use.of_key(A.encode()) and use.of_key(B.encode())
    assert len([r for r in caplog.records if "the tenants stay as they were" in r.getMessage()]) == 1
    write(path, b())
    file.refresh(40.0)
    assert use.of_key(A.encode()) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Invalid JSON"),
        ('{"tenants": []}', "tenants: "),
        (json.dumps({"tenants": [{"name": "Team A", "keys": [A]}]}), "tenants.0.name"),
        (json.dumps({"tenants": [a(), {**b(), "keys": [A]}]}), "a key of team-b is one of team-a too"),
        (json.dumps({"tenants": [a(), {**b(), "name": "team-a"}]}), "team-a: stands twice"),
        (json.dumps({"tenants": [{"name": "a", "keys": ["short"]}]}), "at least 16 characters"),
        (json.dumps({"tenants": [a(requestsPerSecond=0)]}), "greater than 0"),
        (json.dumps({"tenants": [a(limit=1)]}), "tenants.0.limit"),
    ],
)
def test_a_wrong_file_is_refused_by_field_and_without_its_keys(text, words):
    with pytest.raises(ConfigError) as error:
        parse_tenants(text, "f")
    assert words in str(error.value) and A not in str(error.value) and B not in str(error.value)


@given(
    st.floats(0.1, 100),
    st.integers(1, 20),
    st.lists(st.floats(-1.0, 3.0), max_size=60),
)
def test_a_bucket_gives_its_burst_and_its_rate_and_no_more(rate, burst, steps):
    bucket, now, latest, given_ = TokenBucket(rate, burst, 0.0), 0.0, 0.0, 0
    for step in steps:
        now = max(0.0, now + step)
        latest = max(latest, now)
        wait = bucket.take(now)
        given_ += not wait
        assert given_ <= burst + rate * latest + 1e-6
        if wait:
            assert bucket.take(latest + wait + 1e-6) == 0.0, "it says when there is one"
            now = latest = latest + wait + 1e-6
            given_ += 1


def test_salts_differ_by_tenant_and_by_what_it_gives():
    one, two = (Tenant.model_validate({"name": n, "keys": [A]}) for n in ("a", "b"))
    assert len({one.salt(""), one.salt("x"), two.salt(""), two.salt("x")}) == 4

"""Calls of the API for tests: the official client, and streams as they are on the wire."""

from __future__ import annotations

import json

import aiohttp
import openai

HELLO = [{"role": "user", "content": "hi"}]


def client(api, key="any"):
    """Without the certificates that nobody needs here and each client would read anew, which takes 40 ms."""
    plain = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=api.url + "/v1", api_key=key, max_retries=0, timeout=20, http_client=plain)


def spell(tokenizer, text, *, eos=True):
    """A script that answers with `text`."""
    ids = tokenizer.encode(text)
    return lambda request: [*ids, 2] if eos else ids


async def events(api, path, body):
    """Status and `data:` payloads of a stream, as they are on the wire."""
    async with aiohttp.ClientSession() as session, session.post(api.url + path, json=body) as answer:
        raw = (await answer.read()).decode()
        if answer.content_type != "text/event-stream":
            return answer.status, json.loads(raw)
        assert raw.endswith("\n\n")
        return answer.status, [part.removeprefix("data: ") for part in raw[:-2].split("\n\n")]

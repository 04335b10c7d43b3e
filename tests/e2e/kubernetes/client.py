"""Runs in a pod of the cluster and talks to a service as users do: with the official openai client.

    client.py ask  URL MODEL MAX_TOKENS < questions.json     one stream after another; prints {question: answer}
    client.py load URL MODEL MAX_TOKENS WORKERS < lines      first line: the questions as JSON. Workers stream them in
        turn until standard input says more or ends; one JSON line for each request that ended, a last one "done"

No retries: whatever the service does to a request is seen.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import openai

DEADLINE_S = 180.0


async def stream(client: openai.AsyncOpenAI, model: str, question: str, max_tokens: int) -> str:
    """The answer; raises ValueError unless the stream ended with exactly one finish reason and its usage."""
    text, finishes, usages = "", [], 0
    async for chunk in await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usages += chunk.usage is not None
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.finish_reason:
                finishes.append(choice.finish_reason)
    if len(finishes) != 1 or usages != 1:
        raise ValueError(f"a stream with {len(finishes)} finish reasons and {usages} usages")
    return text


async def ask(client: openai.AsyncOpenAI, model: str, max_tokens: int) -> None:
    questions = json.load(sys.stdin)
    print(json.dumps({question: await stream(client, model, question, max_tokens) for question in questions}))


async def load(client: openai.AsyncOpenAI, model: str, max_tokens: int, workers: int) -> None:
    questions = itertools.cycle(json.loads(sys.stdin.readline()))
    stopping = asyncio.Event()

    async def until_told() -> None:
        await asyncio.to_thread(sys.stdin.readline)
        stopping.set()

    async def work(turn: Iterator[str]) -> None:
        while not stopping.is_set():
            question, started = next(turn), time.time()
            said: dict[str, Any] = {"question": question, "started": started}
            try:
                said["answer"] = await stream(client, model, question, max_tokens)
            except (openai.APIError, ValueError) as error:
                said["error"] = f"{type(error).__name__}: {error} {getattr(error, 'body', '')}"
            said["seconds"] = round(time.time() - started, 3)
            print(json.dumps(said), flush=True)
            # A service that refuses at once must not be hammered; nor must one that answers.
            await asyncio.sleep(0.2)

    told = asyncio.create_task(until_told())
    await asyncio.gather(*(work(questions) for _ in range(workers)))
    await told
    print(json.dumps("done"), flush=True)


async def main(command: str, url: str, model: str, max_tokens: str, *workers: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        if command == "ask":
            await ask(client, model, int(max_tokens))
        else:
            await load(client, model, int(max_tokens), int(workers[0]))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

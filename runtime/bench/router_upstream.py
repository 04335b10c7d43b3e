"""A fake engine for `make bench-router`: answers both routers with prepared bytes, so that it never is the bottleneck.

It speaks this project's engine protocol (/info, /ready, /internal/generate with NDJSON lines) and the OpenAI one
(/v1/completions), on one raw asyncio protocol without any framework. A stream is `chunks` pieces `interval` apart.
As `prefill` and `decode` it plays the two legs of either protocol without moving anything.

    python runtime/bench/router_upstream.py PORT --chunks 64 --interval 0.002 --tokenizer DIGEST
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Literal, cast

import uvloop

from isthmus_runtime.protocol.calls import PrefillAnswer
from isthmus_runtime.protocol.info import EngineInfo, KvInfo, TransferInfo
from isthmus_runtime.protocol.lines import reserved_line, token_line
from isthmus_runtime.protocol.ticket import Ticket
from isthmus_runtime.request import FinishReason, TokenChunk

TOKEN = 2229
"""` word` in the model that the router under test has."""
PLAIN_TOKENS = 16
STEP_S = 0.002


def chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def head(kind: bytes, length: int | None = None) -> bytes:
    """A 200 with a length, or chunked."""
    framing = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length
    return b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\n" + framing + b"\r\n\r\n"


def whole(body: bytes) -> bytes:
    """A JSON answer."""
    return head(b"application/json", len(body)) + body


END = chunk(token_line(TokenChunk(finish_reason=FinishReason.LENGTH))) + b"0\r\n\r\n"
NDJSON = head(b"application/x-ndjson")
SSE = head(b"text/event-stream")
EVENT = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}


def event(text: str, reason: str | None) -> bytes:
    """One server-sent event of an OpenAI stream."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    return chunk(b"data: " + json.dumps({**EVENT, "choices": [choice]}).encode() + b"\n\n")


def openai(tokens: int, **more: object) -> bytes:
    """A whole OpenAI answer of `tokens` tokens."""
    choice = {"index": 0, "text": " word" * tokens, "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 300, "completion_tokens": tokens, "total_tokens": 300 + tokens}
    return whole(json.dumps({**EVENT, "choices": [choice], "usage": usage, **more}).encode())


OPENAI_WHOLE = openai(PLAIN_TOKENS)
OPENAI_PREFILL = openai(
    1,
    kv_transfer_params={"remote_engine_id": "e", "remote_block_ids": [1, 2], "remote_host": "h", "remote_port": 1},
)
PROMPT_TOKENS = 300
"""What it says of prompts that come as text: it does not tokenise them."""


def ours_whole(prompt_tokens: int) -> bytes:
    """The lines of a plain answer."""
    answer = TokenChunk(token_ids=(TOKEN,) * PLAIN_TOKENS, note="local", prompt_tokens=prompt_tokens)
    return chunk(token_line(answer)) + END


OURS_WHOLE = ours_whole(0)
OURS_WHOLE_OF_TEXT = ours_whole(PROMPT_TOKENS)


def text_after(body: bytes, key: bytes) -> str:
    """The string value of a key that the body has once, or ""."""
    return body.partition(b'"%b":"' % key)[2].partition(b'"')[0].decode()


class Connection(asyncio.Protocol):
    """One keep-alive connection; requests come one after another."""

    def __init__(self, info: bytes, reserved: dict[str, Connection], chunks: int, interval: float) -> None:
        self.info = info
        self.reserved = reserved
        """Attempt -> the connection on which its tokens are awaited."""
        self.streams = self.text = False
        self.chunks = chunks
        self.interval = interval
        self.buffer = b""
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            headers = self.buffer[:end]
            lower = headers.lower()
            at = lower.find(b"content-length:")
            length = int(lower[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            body = self.buffer[end + 4 : end + 4 + length]
            self.buffer = self.buffer[end + 4 + length :]
            self.answer(headers.split(b" ", 2)[1], body)

    def answer(self, path: bytes, body: bytes) -> None:
        assert self.transport is not None
        if path == b"/info":
            self.transport.write(whole(self.info))
        elif path == b"/internal/generate":
            # The call does not say whether its client streams. In this benchmark the length of the answer does.
            self.streams = b'"max_tokens":%d,' % self.chunks in body
            self.text = b'"prompt":{' in body
            if attempt := text_after(body, b"attempt"):
                self.reserved[attempt] = self
                ticket = Ticket(mode="direct", attempt=attempt, layout_digest="d", session="127.0.0.1:1")
                self.transport.write(NDJSON + chunk(reserved_line(ticket)))
            else:
                self.tokens(NDJSON)
        elif path == b"/internal/prefill":
            answer = PrefillAnswer(attempt=text_after(body, b"attempt"), num_tokens=1)
            self.transport.write(whole(answer.model_dump_json().encode()))
        elif path == b"/internal/commit":
            # An engine answers at once and has its first token a step later.
            self.transport.write(whole(b"{}"))
            self.loop.call_later(STEP_S, self.reserved.pop(text_after(body, b"attempt")).tokens, b"")
        elif path == b"/v1/completions":
            if b'"do_remote_decode":true' in body:
                self.transport.write(OPENAI_PREFILL)
            elif b'"stream": true' in body or b'"stream":true' in body:
                line = event(" word", None)
                last = event(" word", "length") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
                self.stream(SSE, [line] * (self.chunks - 1) + [last])
            else:
                self.transport.write(OPENAI_WHOLE)
        else:
            self.transport.write(whole(b'{"object":"list","data":[{"id":"m","object":"model"}],"status":"ok"}'))

    def tokens(self, opening: bytes) -> None:
        """Our tokens, after `opening`."""
        if self.transport is None:
            return
        if self.streams:
            line = chunk(token_line(TokenChunk(token_ids=(TOKEN,))))
            told = TokenChunk(token_ids=(TOKEN,), note="local", prompt_tokens=PROMPT_TOKENS if self.text else 0)
            self.stream(opening, [chunk(token_line(told)), *[line] * (self.chunks - 2), line + END])
        else:
            self.transport.write(opening + (OURS_WHOLE_OF_TEXT if self.text else OURS_WHOLE))

    def stream(self, opening: bytes, parts: list[bytes]) -> None:
        assert self.transport is not None
        self.transport.write(opening + parts[0])
        started = self.loop.time()

        def step(index: int) -> None:
            if self.transport is None or index == len(parts):
                return
            self.transport.write(parts[index])
            self.loop.call_at(started + (index + 1) * self.interval, step, index + 1)

        self.loop.call_at(started + self.interval, step, 1)


async def serve(
    port: int, role: Literal["unified", "prefill", "decode"], chunks: int, interval: float, tokenizer: str
) -> None:
    """Answer until the process is ended. `tokenizer`: digest of the one that a unified engine has; "": it takes ids
    alone."""
    kv = KvInfo(
        block_size=16, physical_blocks=1001, usable_blocks=1000, bytes_per_block=1, max_model_len=8192,
        layout_digest="d",
    )  # fmt: skip
    transfer = TransferInfo() if role == "unified" else TransferInfo(mode="direct", transport="tcp", epoch="e")
    info = EngineInfo(
        role=role, model="m", served_names=("m",), fingerprint="f", kv=kv, transfer=transfer, version="0",
        tokenizer=tokenizer if role == "unified" else "",
    )  # fmt: skip
    raw = info.model_dump_json().encode()
    loop = asyncio.get_running_loop()
    reserved: dict[str, Connection] = {}

    def connection() -> Connection:
        return Connection(raw, reserved, chunks, interval)

    server = await loop.create_server(connection, "127.0.0.1", port, backlog=2048)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--role", choices=("unified", "prefill", "decode"), default="unified")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--interval", type=float, default=0.002, help="seconds between two chunks")
    parser.add_argument("--tokenizer", default="", help="digest of the one that a unified engine has")
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.role, args.chunks, args.interval, args.tokenizer))

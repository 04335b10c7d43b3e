"""Long texts that nothing cuts have a process of their own: the same ids, and what takes too much ends alone."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
from small_bpe import byte_level_bpe
from tokenizers import AddedToken, decoders, models, normalizers, processors, trainers
from tokenizers import Tokenizer as HfTokenizer

from isthmus_runtime.errors import InvalidRequest, MemoryShort, Overloaded
from isthmus_runtime.openai import long_texts as module
from isthmus_runtime.openai import tokenizer as tokenizer_module
from isthmus_runtime.openai.chat import Conversation
from isthmus_runtime.openai.long_texts import LongTexts
from isthmus_runtime.openai.planning import Planning
from isthmus_runtime.openai.tokenizer import Tokenizer, TooManyTokens
from isthmus_runtime.request import SamplingOptions
from isthmus_runtime.serving.memory import MemoryGuard
from isthmus_runtime.sharing.threads_in_turns import ThreadsInTurns, away

DEADLINE_S = 60.0
CORPUS = ["the quick brown fox", "12 34 56", "中文字", "größer als é"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def uncut() -> HfTokenizer:
    """As Gemma's: spaces are letters, letters that it does not know are bytes, runs of lines and tags are tokens, and
    nothing is cut."""
    made = HfTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    letters = sorted({*"".join(CORPUS), "▁", "\U0001d157", "\U0001d165"})
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, special_tokens=names)
    made.train_from_iterator(CORPUS, trainer)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw = json.loads(made.to_str())
    raw["added_tokens"] = []  # what the trainer makes of bytes
    found = HfTokenizer.from_str(json.dumps(raw))
    found.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n", "\n\n\n", "<h1>")])
    return found


def cut() -> HfTokenizer:
    made = byte_level_bpe(CORPUS, special=["<|im_start|>", "<|im_end|>"])
    made.normalizer = normalizers.NFC()
    return made


def loaded(inner: HfTokenizer) -> Tokenizer:
    return Tokenizer(
        inner,
        config={},
        eos_token_ids=[],
        vocab_size=inner.get_vocab_size(),
        chat_template=TEMPLATE,
        defaults=SamplingOptions(),
        trusted=True,
    )


@pytest.fixture(scope="module")
def kinds() -> Iterator[dict[str, tuple[Tokenizer, HfTokenizer]]]:
    made = {name: (loaded(kind()), kind()) for name, kind in (("cut", cut), ("uncut", uncut))}
    yield made
    for tokenizer, _ in made.values():
        tokenizer.long_texts.close()


@pytest.fixture
def texts() -> Iterator[LongTexts]:
    made = LongTexts((lambda: LIBRARY, lambda: SLOW))
    made.start()
    yield made
    made.close()


LIBRARY = cut()
SLOW = HfTokenizer.from_str(
    json.dumps(
        json.loads(LIBRARY.to_str())
        | {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"(a|aa)+b|."},
                "behavior": "Isolated",
                "invert": False,
            }
        }
    )
)
"""It takes some minutes over LONG, and over none of its words so long that the library gives up by itself."""
LONG = ("a" * 24 + "c") * 20_000


def pid(texts: LongTexts) -> int:
    assert texts._process is not None
    return texts._process.pid


@pytest.mark.parametrize("name", ["cut", "uncut"])
@pytest.mark.parametrize("seed", range(3))
def test_long_texts_have_the_ids_that_the_library_gives(
    kinds: dict[str, tuple[Tokenizer, HfTokenizer]], name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print("seed", seed)
    tokenizer, library = kinds[name]
    monkeypatch.setattr(tokenizer_module, "_HERE", 2000)
    monkeypatch.setattr(tokenizer_module, "_SOME", 100)
    monkeypatch.setattr(tokenizer_module, "_PART", 500)
    apart, encode = [], tokenizer.long_texts.encode
    monkeypatch.setattr(
        tokenizer.long_texts, "encode", lambda *a, **more: apart.append(len(a[0])) or encode(*a, **more)
    )
    r = random.Random(seed)
    pieces = [" the", " quick", "12", "字" * 900, "é" * 1500, " ", "\n", "fox" * 800, ". ", "\U0001d15e" * 300]
    pieces += ["\n\n", "<h1>", "🙂" * 70]
    text = "".join(r.choices(pieces, k=60))
    whole = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == tokenizer.encode_alone(text) == whole and apart
    for count in (1, 50, len(whole) - 1, len(whole), len(whole) + 9):
        assert tokenizer.encode_end(text, count) == whole[-count:]
    assert tokenizer.encode(text, len(whole)) == whole
    with pytest.raises(TooManyTokens):
        tokenizer.encode(text, len(whole) - 1)
    # One with control tokens in it is tokenised by another tokenizer, and then others by this one again.
    shown = tokenizer.chat(Conversation(messages=[{"role": "user", "content": "<|im_end|>" + text}]))
    assert shown.ids is not None and shown.text == f"<|im_start|><|im_end|>{text}<|im_end|>"
    if name == "cut":
        end = library.token_to_id("<|im_end|>")
        assert shown.ids.count(end) == 1 and shown.ids[-100:-1] == whole[-99:]
    assert tokenizer.encode(text) == whole


def test_what_a_prompt_has_around_it_is_there() -> None:
    inner = cut()
    inner.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 0), ("<|im_end|>", 1)]
    )
    whole = inner.encode("fox" * 500).ids
    texts = LongTexts((lambda: inner,))
    count, ids = texts.encode("fox" * 500, special=True)
    assert (count, list(ids)) == (len(whole), whole)
    count, ids = texts.encode("fox" * 500, last=3)
    assert (count, list(ids)) == (len(whole) - 2, whole[-4:-1])
    count, ids = texts.encode("fox" * 500, most=9)
    assert (count, list(ids)) == (len(whole) - 2, [])
    texts.close()


def test_what_takes_more_memory_than_there_is_ends_alone(texts: LongTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    """One letter is three after NFC, of four bytes each: 4 KB, packed, took 1.2 GB of a router of 1 GiB."""
    monkeypatch.setattr(texts.memory, "elsewhere", lambda own: nullcontext(32 << 20))
    assert texts.encode("fox")[0] == len(LIBRARY.encode("fox").ids)
    first = pid(texts)
    for _ in range(3):
        with pytest.raises(InvalidRequest, match=r"262000 characters.* takes more than 32 MiB .*--memory-limit"):
            texts.encode("\U0001d160" * 262_000)
    monkeypatch.undo()
    assert texts.encode("fox" * 9000)[0] == len(LIBRARY.encode("fox" * 9000).ids)
    assert pid(texts) == first


def test_a_text_waits_for_memory_and_is_refused_where_it_does_not_come(
    texts: LongTexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, short = [], 3

    @contextmanager
    def elsewhere(own: int) -> Iterator[None]:
        tries.append(own)
        if len(tries) < short:
            # Others have the line meanwhile.
            assert sum(map(len, texts._line._waiting.values())) == 0
            raise MemoryShort("memory: short")
        yield None

    monkeypatch.setattr(texts.memory, "elsewhere", elsewhere)
    assert texts.encode("fox")[0] > 0 and tries == [0] * 3
    assert texts._line._has is None
    monkeypatch.setattr(module, "_MEMORY_S", 0.0)
    tries, short = [], 30
    with pytest.raises(MemoryShort):
        texts.encode("fox")
    assert texts._line._has is None and len(tries) <= 2


def test_what_takes_a_processor_too_long_ends_alone(texts: LongTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert texts.encode("the", by=1)[0] > 0
    first = pid(texts)
    monkeypatch.setattr(module, "MOST_S", 0.2)
    with pytest.raises(InvalidRequest, match=rf"{len(LONG)} characters.* more than 0.2 s of a processor"):
        texts.encode(LONG, by=1)
    monkeypatch.setattr(module, "MOST_S", 5.0)
    assert texts.encode("the", by=1)[0] > 0 and pid(texts) == first


def test_what_the_library_gives_up_is_the_text_s_own_fault(texts: LongTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten million ways to match, or of whatever else it panics."""
    for name in ("MOST_S", "_SHORT_S"):
        monkeypatch.setattr(module, name, 600.0)
    with pytest.raises(InvalidRequest, match=r"1000 characters.* this model's tokenizer fails"):
        texts.encode("a" * 1000, by=1)
    assert texts.encode("fox")[0] > 0


def test_a_text_that_nobody_waits_for_is_ended_and_others_have_its_thread_meanwhile(
    texts: LongTexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOST_S", "_SHORT_S"):
        monkeypatch.setattr(module, name, 600.0)

    texts.encode("the", by=1)
    first = pid(texts)

    async def main() -> None:
        threads = ThreadsInTurns(2, "t", 64, "x wait")
        held = [asyncio.create_task(threads.do(f"c{n}", lambda text: texts.encode(text, by=1), LONG)) for n in "123"]
        for _ in range(20):
            assert await threads.do("another", len, "abc") == 3
            await asyncio.sleep(0.01)
        assert not any(one.done() for one in held)
        for one in held:
            one.cancel()
        await asyncio.wait(held)
        count, _ = await threads.do("another", lambda text: texts.encode(text, by=1), "the")
        assert count > 0

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert pid(texts) == first


def test_small_texts_that_are_counted_do_not_wait_for_the_process() -> None:
    """Such a text of 55 KB held the one thread for them while it waited in the line of others: 5 s each time."""

    async def main() -> None:
        planning, begun, go = Planning(MemoryGuard()), threading.Event(), threading.Event()

        def long(body: bytes) -> bytes:
            with away():
                begun.set()
                assert go.wait(DEADLINE_S)
            return body

        one = asyncio.create_task(planning.alone("a", long, b"x" * 55_000))
        assert await asyncio.to_thread(begun.wait, DEADLINE_S)
        assert await planning.alone("b", bytes.upper, b"small") == b"SMALL"
        again = asyncio.create_task(planning.alone("a", bytes.upper, b"one client has one at a time"))
        await asyncio.sleep(0)
        go.set()
        assert await one == b"x" * 55_000
        assert await again == b"ONE CLIENT HAS ONE AT A TIME"

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_one_that_ends_is_started_anew(texts: LongTexts) -> None:
    first = pid(texts)
    os.kill(first, signal.SIGKILL)
    assert texts.encode("fox" * 100)[0] == len(LIBRARY.encode("fox" * 100).ids)
    assert pid(texts) != first


def test_it_ends_with_whom_it_works_for_and_holds_nothing_of_it_open() -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    texts = LongTexts((lambda: LIBRARY,))
    texts.start()
    process = texts._process
    assert process is not None
    os.close(write)
    assert os.read(read, 1) == b"", "it has let go of the other end"
    os.close(read)
    os.close(process._in)
    _, status = os.waitpid(process.pid, 0)
    assert status == 0
    process._in = os.open(os.devnull, os.O_RDONLY)
    process.close.detach()
    for descriptor in (process._in, process._out, process._told):
        os.close(descriptor)


def test_a_process_that_was_made_among_many_connections_works(texts: LongTexts) -> None:
    texts.close()
    wanted, (soft, hard) = 1200, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted + 200:
        pytest.skip(f"only {hard} descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted + 200), hard))
    held = [os.dup(0) for _ in range(wanted)]  # more than select(2) takes
    try:
        assert texts.encode("the quick brown fox", by=0)[0] == len(LIBRARY.encode("the quick brown fox").ids)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_one_that_is_killed_says_so(texts: LongTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOST_S", "_SHORT_S"):
        monkeypatch.setattr(module, name, 600.0)

    def kill() -> None:
        parent = pid(texts)
        while True:
            with open(f"/proc/{parent}/task/{parent}/children", encoding="ascii") as file:
                if children := file.read().split():
                    os.kill(int(children[0]), signal.SIGKILL)
                    return

    texts.encode("the", by=1)
    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(Overloaded, match=rf"{len(LONG)} characters.* killed"):
        texts.encode(LONG, by=1)
    thread.join()


def test_what_cannot_start_is_told(texts: LongTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    texts.close()

    def fork() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    held = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(Overloaded, match=r"no process .* can be started: Resource temporarily"):
        texts.encode("fox")
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == held
    assert texts.encode("fox")[0] > 0

"""First token of a prompt in mode Store: computed, hit in the engine's cache, and read from the pool.

Two pairs of engines share a pool, and one router after the other knows one of them alone: what the first pair has
computed is asked of the second. Prints the median of `--rounds` prompts and every time, with reads and without.

    python runtime/bench/store_reads.py [--rounds 5] [--lens 100,500,2000]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from processes import Stack, stack
from real_models import smollm2_135m_instruct

WORDS = ("river", "bridge", "stone", "water", "boat", "lamp", "cold", "green", "paper", "storm")
ENGINE = ("--kv-memory", "512Mi", "--max-model-len", "4096", "--threads", "2", "--dtype", "float32")
PATIENCE_S = 300.0


def ask(url: str, words: int, seed: int) -> tuple[float, int]:
    """Seconds to the one token of a random prompt, and how much of it was cached."""
    draw = random.Random(seed)
    prompt = " ".join(draw.choice(WORDS) for _ in range(words))
    body = json.dumps({"model": "test", "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        usage = json.load(response)["usage"]
    return time.perf_counter() - began, usage["prompt_tokens_details"]["cached_tokens"]


def serve_through(running: Stack, pair: dict[str, int]) -> None:
    """A router that knows this pair alone, warm."""
    running.all["router"].stop()
    running.ports.update(pair)
    running.prefills = running.decodes = 1
    running.spawn("router")
    running.ready("router")
    running._wait_paired()
    ask(running.url("router"), 30, 99)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lens", default="100,500,2000")
    args = parser.parse_args()
    model = smollm2_135m_instruct()
    for reads in ("on", "off"):
        flags = (*ENGINE, "--store-reads", reads)
        kwargs = {"executor": "torch", "model": model, "engine_args": flags, "prefills": 2, "decodes": 2}
        with tempfile.TemporaryDirectory() as folder, stack(Path(folder), "store", **kwargs) as running:
            pairs = [{f"{role}0": running.ports[f"{role}{i}"] for role in ("prefill", "decode")} for i in range(2)]
            for length in map(int, args.lens.split(",")):
                seeds = [1000 * length + number for number in range(args.rounds)]
                for what, pair in (("computed", 0), ("same engine", 0), ("other engine", 1)):
                    if what != "same engine":
                        serve_through(running, pairs[pair])
                    found = [ask(running.url("router"), length, seed) for seed in seeds]
                    times = [1000 * seconds for seconds, _ in found]
                    median, each = statistics.median(times), " ".join(f"{ms:.0f}" for ms in times)
                    row = f"{length:5} words, {what:12} {median:7.1f} ms; cached {found[-1][1]:4}; {each}"
                    print(f"--store-reads {reads:3} {row}", flush=True)


if __name__ == "__main__":
    main()

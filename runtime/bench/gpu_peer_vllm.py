"""Rows of the GPU's table by vLLM, in a process of its own and with the peer's interpreter: `gpu_peer.py` runs it.

As `gpu.py` runs them: random ("dummy") weights of the same shape, the same lengths, greedy, no end of text, no prefix
cache, offline. All else is as vLLM chooses. Writes the JSON again after each row, so that what was measured stays when
a later row fails.

    python runtime/bench/gpu_peer_vllm.py --model qwen3-8b --rows single,decode --json FILE
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

from gpu_table import MODELS, ROWS, WARM_UP, prompts, say, shortened  # noqa: E402

# Last: this folder has modules of common names. Still there: vLLM's processes begin by importing this one.
_HERE = str(Path(__file__).parent)
sys.path.remove(_HERE)
sys.path.append(_HERE)


def main() -> None:
    """Start vLLM, run the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, choices=MODELS)
    parser.add_argument("--rows", default="", help="comma-separated names, or none (start only); default: all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--memory-fraction", type=float, default=0.9)
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--kv-dtype", default="auto", choices=["auto", "bfloat16", "fp8"])
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()

    import vllm

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[args.model]))
        engine = vllm.LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=args.max_model_len,
            max_num_seqs=256,
            gpu_memory_utilization=args.memory_fraction,
            enable_prefix_caching=False,
            disable_log_stats=True,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_dtype,
        )
        started = time.perf_counter() - STARTED
        found: dict[str, Any] = {"version": vllm.__version__, "start_s": started, "rows": {}}
        _write(args.json, found)
        say(f"vllm {vllm.__version__}: {args.model} ready after {started:.1f} s")
        rng = random.Random(0)

        def run(count: int, length: int, output: int) -> float:
            inputs = [{"prompt_token_ids": ids} for ids in prompts(rng, count, length, args.model)]
            sampling = vllm.SamplingParams(
                temperature=0, max_tokens=output, min_tokens=output, ignore_eos=True, detokenize=False
            )
            begin = time.perf_counter()
            answers = engine.generate(inputs, sampling, use_tqdm=False)
            seconds = time.perf_counter() - begin
            lengths = [len(answer.outputs[0].token_ids) for answer in answers]
            assert lengths == [output] * count, lengths
            return seconds

        for shape in () if args.rows == "none" else WARM_UP:
            run(*shape)
        for row in ROWS:
            if args.rows and row.name not in args.rows.split(","):
                continue
            output, repeats = shortened(row, args.quick)
            values = [row.value(run(row.requests, row.input_len, output), output) for _ in range(repeats)]
            found["rows"][row.name] = {"values": values, "output_len": output}
            _write(args.json, found)
            say(f"vllm {vllm.__version__}: {row.title}, {row.unit}: " + ", ".join(f"{v:.1f}" for v in values))


def _write(path: Path, found: dict[str, Any]) -> None:
    """Whole, or not at all: this process may be ended at any time."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(path)


if __name__ == "__main__":
    main()

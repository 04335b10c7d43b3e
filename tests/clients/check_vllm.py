"""`vllm bench serve`: random prompts, streamed, none of which fails."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = sys.argv[1:]

with tempfile.TemporaryDirectory() as folder:
    run = [str(Path(sys.executable).parent / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", URL]
    run += ["--model", "smollm2", "--tokenizer", MODEL, "--dataset-name", "random", "--num-prompts", "8"]
    run += ["--random-input-len", "64", "--random-output-len", "16", "--save-result"]
    run += ["--result-dir", folder, "--result-filename", "result.json"]
    subprocess.run(run, check=True, stdin=subprocess.DEVNULL)
    found = json.loads(Path(folder, "result.json").read_text())
assert found["completed"] == 8 and found["total_output_tokens"] == 8 * 16, found

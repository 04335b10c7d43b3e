"""guidellm: a short run of synthetic prompts, all of them answered with as many tokens as it asks for."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = sys.argv[1:]
REQUESTS, TOKENS = 8, 16

with tempfile.TemporaryDirectory() as folder:
    report = Path(folder, "report.json")
    run = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-progress"]
    run += ["--backend", f"kind=openai_http,target={URL},model=smollm2"]
    run += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    run += ["--tokenizer", f"kind=huggingface_auto,model={MODEL}"]
    run += ["--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={TOKENS}"]
    run += ["--output", f"kind=json,path={report}"]
    subprocess.run(run, check=True, stdin=subprocess.DEVNULL)
    (found,) = json.loads(report.read_text())["benchmarks"]
assert found["metrics"]["request_totals"] == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
counts = found["metrics"]["output_token_count"]["successful"]
assert counts["min"] == counts["max"] == TOKENS, counts

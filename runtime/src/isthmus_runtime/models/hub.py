"""Downloads a model from the Hugging Face hub: configuration, tokenizer and safetensors only."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import WeightsError
from .config import read_model_spec

# Nothing that can run code: no pickles, no Python files.
_ALLOWED = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt", "LICENSE*")


def fetch(repo: str, revision: str, out: Path, progress: Callable[[str], None]) -> None:
    """Download `repo` at `revision` into `out`, which appears whole or not at all.

    Raises WeightsError when the hub cannot be reached, has no such model or revision, or the model is of no supported
    kind.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from requests.exceptions import RequestException

    if out.exists() and any(out.iterdir()):
        raise WeightsError(f"{out} exists and is not empty; remove it or name another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        partial.chmod(0o755)
        progress(f"downloading {repo} at {revision}")
        try:
            snapshot_download(repo, revision=revision, local_dir=partial, allow_patterns=list(_ALLOWED))
        except GatedRepoError as e:
            raise WeightsError(f"{repo} needs its licence accepted on the hub, and a token in HF_TOKEN: {e}") from e
        except RevisionNotFoundError as e:
            raise WeightsError(f"{repo} has no revision {revision!r}") from e
        except RepositoryNotFoundError as e:
            raise WeightsError(f"{repo} does not exist on the hub, or is private and HF_TOKEN is not set") from e
        except HFValidationError as e:
            raise WeightsError(f"{repo!r} is not a hub id of the form owner/name: {e}") from e
        except (LocalEntryNotFoundError, HfHubHTTPError, RequestException, OSError) as e:
            raise WeightsError(
                f"the hub could not be reached for {repo} at {revision}: {type(e).__name__}: {e}. "
                "Check the network or HF_ENDPOINT, or copy the model here and name its directory"
            ) from e
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        read_model_spec(partial)
        if not any(partial.glob("*.safetensors")):
            raise WeightsError(f"{repo} at {revision} has no safetensors weights")
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    progress(f"wrote {out}")

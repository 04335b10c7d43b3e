"""Downloads a model from the Hugging Face hub: configuration, tokenizer and safetensors only."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..errors import WeightsError
from .fetching import MODEL_FILES, TOKENIZER_FILES, Progress, in_place, no_space


def fetch(
    repo: str,
    revision: str,
    out: Path,
    progress: Progress,
    *,
    token: str = "",
    tokenizer_only: bool = False,
    resume_as: str = "",
) -> None:
    """Download `repo` at `revision` into `out`, which appears whole or not at all.

    `token`: access token; empty: what the environment offers (HF_TOKEN). `resume_as`: see `in_place`; the client goes
    on in the middle of a file. Raises WeightsError when the hub cannot be
    reached, has no such model or revision, or the model is of no supported kind.
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

    def download(folder: Path) -> None:
        progress(f"downloading {repo} at {revision}")
        patterns = list(TOKENIZER_FILES if tokenizer_only else MODEL_FILES)
        try:
            snapshot_download(repo, revision=revision, local_dir=folder, allow_patterns=patterns, token=token or None)
        except GatedRepoError as e:
            raise WeightsError(f"{repo} needs its licence accepted on the hub, and an access token: {e}") from e
        except RevisionNotFoundError as e:
            raise WeightsError(f"{repo} has no revision {revision!r}") from e
        except RepositoryNotFoundError as e:
            raise WeightsError(f"{repo} does not exist on the hub, or is private and no access token was given") from e
        except HFValidationError as e:
            raise WeightsError(f"{repo!r} is not a hub id of the form owner/name: {e}") from e
        except (LocalEntryNotFoundError, HfHubHTTPError, RequestException, OSError) as e:
            if no_space(e):
                raise
            raise WeightsError(
                f"the hub could not be reached for {repo} at {revision}: {type(e).__name__}: {e}. "
                "Check the network or HF_ENDPOINT, or copy the model here and name its directory"
            ) from e
        shutil.rmtree(folder / ".cache", ignore_errors=True)

    in_place(out, progress, download, weights=not tokenizer_only, resume_as=resume_as)

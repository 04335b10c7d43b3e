"""A draft model beside the model that an engine serves: loaded, checked against it, with a pool of its own."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoints.provenance import verify_files
from ..config import KvConfig, ModelConfig, SchedulerConfig
from ..engine.draft_model import ROWS, DraftModel, DraftRows
from ..errors import ConfigError
from ..executor.loading import load
from ..executor.model_runner import TorchExecutor
from ..kv.plan import kv_shape, plan
from ..kv.plan_input import KvPlanInput
from ..models.registry import read_model_spec

log = logging.getLogger(__name__)

_STEP_TOKENS = 512
"""Most tokens of a prompt that the draft model computes at a time."""
_LONGEST = 4096
"""Longer requests are not guessed for: the pool has room for all rows at this length."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """A draft model, and its executor, which is closed after the engine has stopped."""

    model: DraftModel
    executor: TorchExecutor


def load_drafts(draft: Path, model: ModelConfig, *, block_size: int, max_model_len: int | None) -> Drafts:
    """Load the draft model and make its pool. ConfigError where its files are not those that were fetched, or its
    tokenizer is not that of the served `model`.

    To be called before memory is measured for the served model's pool. `max_model_len`: of requests; None: any.
    """
    served = Path(model.path)
    verify_files(draft)
    if _vocabulary(served) != _vocabulary(draft):
        raise ConfigError(
            f"--speculative-model {draft}: its tokenizer is not that of --model {served}, the same text has other ids; "
            "give a draft model of the same family"
        )
    ours, theirs = (read_model_spec(str(path)).vocab_size for path in (served, draft))
    if theirs > ours:
        raise ConfigError(f"--speculative-model {draft}: it has {theirs} token ids, --model {served} has {ours}")
    scheduler = SchedulerConfig(max_num_seqs=ROWS, max_batched_tokens=_STEP_TOKENS, max_model_len=_LONGEST)
    loaded = load(replace(model, path=str(draft), quantization="auto"), scheduler)
    kv_config = KvConfig(block_size=block_size)
    longest = min(_LONGEST, loaded.spec.max_position, max_model_len or _LONGEST)
    wanted = KvPlanInput(
        ranks=(loaded.layer_specs(kv_config.block_size, kv_config.dtype),),
        available_bytes=(0,),
        max_model_len=longest,
        max_num_batched_tokens=_STEP_TOKENS,
        batches_in_flight=2,
    )
    shape = kv_shape(wanted)
    blocks = 1 + ROWS * sum(-(-longest // group.block_size) for group in shape.groups)
    pool = plan(replace(wanted, available_bytes=(blocks * shape.bytes_per_block,)))
    log.info("draft model %s: %d rows, %.1f MiB of KV", draft, ROWS, blocks * shape.bytes_per_block / 2**20)
    executor = TorchExecutor(loaded, pool, scheduler, kv_config)
    return Drafts(DraftModel(executor, DraftRows(pool, ROWS, _STEP_TOKENS), theirs), executor)


def _vocabulary(model: Path) -> tuple[object, object]:
    """Which text is which id."""
    try:
        found = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
        return found["model"], [(token["id"], token["content"]) for token in found.get("added_tokens", [])]
    except (OSError, ValueError, KeyError) as e:
        raise ConfigError(f"{model}: its tokenizer.json cannot be read: {e}") from e

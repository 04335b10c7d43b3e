"""The KV plan of an engine, out of its configuration and what memory its ranks have."""

from __future__ import annotations

from ..config import EngineConfig
from ..engine.loop import STEPS_IN_FLIGHT
from ..errors import ConfigError
from ..kv.groups import LayerSpec
from ..kv.plan import KvPlan, plan
from ..kv.plan_input import KvPlanInput


def plan_pool(
    config: EngineConfig, specs: tuple[LayerSpec, ...], available: tuple[int, ...], model_limit: int
) -> KvPlan:
    """`specs`: a rank's layers, alike on all; `available`: the bytes that each rank has for its pool; `model_limit`:
    tokens of a request, of the model. ConfigError where the engine is to serve longer ones, or has no room."""
    asked = config.scheduler.max_model_len
    if asked is not None and asked > model_limit:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {model_limit} positions that {config.model.path} has; give "
            f"{model_limit} or less, or auto (engine.maxModelLen of a resource)"
        )
    return plan(
        KvPlanInput(
            ranks=(specs,) * len(available),
            available_bytes=available,
            max_model_len=asked or model_limit,
            auto_fit=asked is None,
            num_blocks_override=config.kv.num_blocks_override,
            max_num_batched_tokens=config.scheduler.max_batched_tokens,
            batches_in_flight=STEPS_IN_FLIGHT,
        )
    )

"""The KV plan of an engine, out of its configuration and what memory its ranks have."""

from __future__ import annotations

from ..config import EngineConfig
from ..engine.loop import STEPS_IN_FLIGHT
from ..kv.groups import LayerSpec
from ..kv.plan import KvPlan, plan
from ..kv.plan_input import KvPlanInput


def plan_pool(
    config: EngineConfig, specs: tuple[LayerSpec, ...], available: tuple[int, ...], model_limit: int
) -> KvPlan:
    """`specs`: a rank's layers, alike on all; `available`: the bytes that each rank has for its pool."""
    return plan(
        KvPlanInput(
            ranks=(specs,) * len(available),
            available_bytes=available,
            max_model_len=config.scheduler.max_model_len or model_limit,
            auto_fit=config.scheduler.max_model_len is None,
            num_blocks_override=config.kv.num_blocks_override,
            max_num_batched_tokens=config.scheduler.max_batched_tokens,
            batches_in_flight=STEPS_IN_FLIGHT,
        )
    )

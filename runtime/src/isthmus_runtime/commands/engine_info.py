"""What an engine answers to GET /info, put together from its configuration and its state. Pure."""

from __future__ import annotations

from importlib.metadata import version

from ..config import EngineConfig
from ..engine.seam import AdapterList, EngineFacts, EngineStatus
from ..protocol.info import AdapterInfo, AdapterListInfo, AdapterProblemInfo, EngineInfo, LoadInfo

_MOST_PROBLEMS = 65
"""Of adapters: routers ask every second. Metrics count all."""


def engine_info(
    config: EngineConfig,
    facts: EngineFacts,
    now: EngineStatus,
    *,
    generated_tokens: int,
    draining: bool,
    tokenizer: str,
    vocabulary: str,
) -> EngineInfo:
    """`tokenizer`, `vocabulary`: as in EngineInfo."""
    stats = now.snapshot.stats
    return EngineInfo(
        role=config.role.value,  # type: ignore[arg-type]
        model=config.model.path,
        served_names=config.model.served_names,
        fingerprint=facts.fingerprint,
        kv=facts.kv,
        transfer=facts.transfer,
        version=version("isthmus-runtime"),
        running=stats.running,
        waiting=stats.waiting + stats.receiving,
        load=LoadInfo(
            kv_usage=now.snapshot.kv_usage,
            generated_tokens=generated_tokens,
            sent_bytes=0 if now.moved is None else now.moved.sent_bytes,
        ),
        draining=draining,
        adapters=tuple(AdapterInfo(name=adapter.name, digest=adapter.digest) for adapter in now.adapters),
        adapter_list=None if now.adapter_list is None else _list_info(now.adapter_list),
        vocab_size=facts.vocab_size,
        task=facts.task,
        rank_sums=facts.rank_sums,
        model_revision=facts.model_revision,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        begins_early=True,
    )


def _list_info(found: AdapterList) -> AdapterListInfo:
    problems = tuple(AdapterProblemInfo(name=one.name, problem=one.problem) for one in found.problems[:_MOST_PROBLEMS])
    return AdapterListInfo(digest=found.digest, listed=found.listed, problems=problems)

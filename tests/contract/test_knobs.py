"""The command line is a contract: a new or changed flag edits this list in review."""

from __future__ import annotations

import argparse

from isthmus_runtime.commands.bench import build_bench_parser
from isthmus_runtime.serve_flags import build_serve_parser

SERVE = {
    "--role": None,
    "--host": "127.0.0.1",
    "--port": "8000",
    "--drain-timeout": "120s",
    "--no-progress-timeout": "120s",
    "--metrics-port": "0",
    "--peer-credentials": "",
    "--api-process": "auto",
    "--max-connections": "16384",
    "--max-connections-per-address": "8192",
    "--max-body-memory": "256Mi",
    "--memory-limit": "",
    "--trace-endpoint": "",
    "--trace-sampling": "1",
    "--log-level": "info",
    "--model": None,
    "--served-model-name": [],
    "--executor": "torch",
    "--device": "auto",
    "--dtype": "auto",
    "--quantization": "auto",
    "--task": "auto",
    "--deterministic": "off",
    "--threads": "0",
    "--tensor-parallel-size": "1",
    "--max-model-len": "auto",
    "--max-batched-tokens": "2048",
    "--max-step-time": "200ms",
    "--max-num-seqs": "128",
    "--speculative-method": "none",
    "--speculative-model": "",
    "--speculative-tokens": "6",
    "--lora": [],
    "--max-loras": "auto",
    "--max-lora-rank": "16",
    "--lora-memory": "4Gi",
    "--lora-dir": "",
    "--lora-file": "",
    "--max-waiting": "1024",
    "--queue-timeout": "300s",
    "--block-size": "16",
    "--kv-dtype": "auto",
    "--kv-memory": "",
    "--kv-memory-fraction": "0.5",
    "--num-blocks-override": "",
    "--no-prefix-caching": False,
    "--kv-layout": "block-major",
    "--transfer-mode": "none",
    "--transfer-transport": "auto",
    "--transfer-fallback": "deny",
    "--transfer-timeout": "30s",
    "--transfer-on-failure": "recompute",
    "--transfer-host": "",
    "--transfer-crc": False,
    "--store-master": "",
    "--store-segment-size": "1Gi",
    "--store-replicas": "1",
    "--store-reads": "on",
    "--store-secret-file": "",
    "--control-tokens": "request",
    "--trust-tokenizer": "off",
    "--tool-format": "auto",
    "--reasoning": "auto",
    "--prefill": "",
    "--decode": "",
    "--worker": "",
    "--policy": "least-load",
    "--disaggregate-above": "0",
    "--on-prefill-unavailable": "local",
    "--max-queue": "1024",
    "--request-timeout": "600s",
    "--discovery-interval": "1s",
    "--api-key-file": "",
    "--tenants-file": "",
    "--lora-updates": "off",
    "--cors-origins": "",
    "--page": "on",
}
BENCH = {
    "--url": "http://127.0.0.1:8000",
    "--model": None,
    "--requests": 64,
    "--input-len": 256,
    "--output-len": 64,
    "--concurrency": 64,
    "--vocab-size": 49152,
    "--seed": 0,
    "--timeout": 600.0,
    "--json": False,
    "--steps": False,
    "--replay": "",
    "--max-model-len": 2048,
    "--out": "",
}


def flags(parser: argparse.ArgumentParser) -> dict[str, object]:
    return {a.option_strings[-1]: a.default for a in parser._actions if a.option_strings and a.dest != "help"}


def test_serve_flags_and_defaults() -> None:
    assert flags(build_serve_parser()) == SERVE


def test_bench_flags_and_defaults() -> None:
    assert flags(build_bench_parser()) == BENCH

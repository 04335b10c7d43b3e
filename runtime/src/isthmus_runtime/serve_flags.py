"""The command line of `serve`: its flags, and the configuration that they make.

Parsing has no side effects; every problem is reported at once, each naming the flag, the value and the fix.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from .config import (
    ChatConfig,
    EngineConfig,
    KvConfig,
    ModelConfig,
    OnFailure,
    Role,
    RouterConfig,
    SchedulerConfig,
    ServerConfig,
    StoreConfig,
    TracingConfig,
    TransferConfig,
    pod_ip,
)
from .errors import ConfigError
from .flag_reader import FlagReader
from .lora_config import add_lora_flags, add_router_lora_flags, read_lora


def _items(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


class _Parser(argparse.ArgumentParser):
    """Reports like the rest of the configuration: one line for the problem, not a page of usage before it."""

    def error(self, message: str) -> NoReturn:
        hint = "--help lists all flags"
        if message.startswith("unrecognized arguments"):
            # The first words of a pod that does not start: of what an operator renders, nobody has typed anything.
            hint += (
                f" of this version, {version('isthmus-runtime')}; where an operator set them, it is newer: give the "
                "service images of the operator's version"
            )
        raise ConfigError(f"{message}; {hint}")


def build_serve_parser() -> argparse.ArgumentParser:
    """Flags of `isthmus-runtime serve`. tests/contract freezes this list."""
    # Whole names only: the operator refuses in extraArgs the flags that it sets, by their names.
    p = _Parser(prog="isthmus-runtime serve", description="Run one role of an Isthmus service.", allow_abbrev=False)
    p.add_argument("--role", required=True, choices=[r.value for r in Role])
    p.add_argument("--host", default="127.0.0.1", help="address to listen on")
    p.add_argument("--port", default="8000", help="port to listen on")
    p.add_argument("--drain-timeout", default="120s", help="after SIGTERM, how long running requests may take")
    p.add_argument("--no-progress-timeout", default="120s", help="/health fails after this long with work and no step")
    p.add_argument("--metrics-port", default="0", help="a port of its own for /metrics and probes; 0: --port")
    p.add_argument("--peer-credentials", default="", help="folder with token and trust.json; none: no authentication")
    p.add_argument(
        "--api-process",
        default="auto",
        choices=["auto", "on", "off"],
        help="engine and HTTP in a process each; auto: where there is a GPU",
    )
    p.add_argument("--max-connections", default="16384", help="fewer where RLIMIT_NOFILE has no room for them")
    p.add_argument("--max-connections-per-address", default="8192", help="a gateway in front is one address")
    p.add_argument(
        "--max-body-memory",
        default="256Mi",
        help="of all request bodies that are not answered yet; a third of what the memory limit leaves at most",
    )
    p.add_argument(
        "--memory-limit",
        default="",
        help="near which requests are refused; default: the control group's. Of this process and its engine process: "
        "leave room for those that tokenise long texts (70 MB) and check grammars (up to 384 MiB)",
    )
    p.add_argument("--trace-endpoint", default="", help="http(s)://host:4318 of an OpenTelemetry collector; none: off")
    p.add_argument("--trace-sampling", default="1", help="share of traces that begin here, above 0 up to 1")
    p.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    p.add_argument("--model", required=True, help="directory with config.json, safetensors and tokenizer.json")
    p.add_argument("--served-model-name", action="append", default=[], help="repeatable; default: directory name")
    _add_engine_flags(p.add_argument_group("engine (prefill, decode, unified)"))
    _add_transfer_flags(p.add_argument_group("transfer"))
    _add_chat_flags(p.add_argument_group("chat (unified, router)"))
    _add_router_flags(p.add_argument_group("router"))
    return p


def _add_engine_flags(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument("--executor", default="torch", choices=["torch", "fake"])
    engine.add_argument(
        "--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto: a usable GPU, else CPU"
    )
    engine.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    engine.add_argument(
        "--quantization",
        default="auto",
        choices=["auto", "fp8", "none"],
        help="multiply 8- and 4-bit floats; auto: those of the checkpoint, if the device can; fp8: round all weights",
    )
    tasks = ["auto", "generate", "embed", "score"]
    engine.add_argument("--task", default="auto", choices=tasks, help="auto: embed where the model's files say so")
    engine.add_argument(
        "--deterministic", default="off", choices=["on", "off"], help="tokens alike in any batch; slower"
    )
    engine.add_argument("--threads", default="0", help="CPU threads; 0: all this process may use")
    engine.add_argument("--tensor-parallel-size", default="1", help="ranks that compute the model together, a GPU each")
    engine.add_argument("--max-model-len", default="auto", help="tokens, or auto")
    engine.add_argument("--max-batched-tokens", default="2048")
    engine.add_argument("--max-step-time", default="200ms", help="longest gap that prompts may make in a stream")
    engine.add_argument("--max-num-seqs", default="128")
    engine.add_argument(
        "--speculative-method", default="none", choices=["none", "ngram", "model"], help="guess tokens ahead"
    )
    engine.add_argument("--speculative-model", default="", help="a small model of the same tokenizer that guesses")
    engine.add_argument("--speculative-tokens", default="6", help="most guesses of a row and step")
    add_lora_flags(engine)
    engine.add_argument("--max-waiting", default="1024")
    engine.add_argument("--queue-timeout", default="300s")
    engine.add_argument("--block-size", default="16")
    engine.add_argument("--kv-dtype", default="auto", choices=["auto", "float32", "bfloat16", "fp8"])
    engine.add_argument("--kv-memory", default="", help="pool size of a rank, as 2Gi; default: by fraction")
    engine.add_argument("--kv-memory-fraction", default="0.5", help="CPU: of free memory; GPU: of the whole GPU")
    engine.add_argument("--num-blocks-override", default="")
    engine.add_argument("--no-prefix-caching", action="store_true")
    engine.add_argument("--kv-layout", default="block-major", choices=["block-major", "layer-major"])


def _add_transfer_flags(transfer: argparse._ArgumentGroup) -> None:
    transfer.add_argument("--transfer-mode", default="none", choices=["none", "direct", "store"])
    transfer.add_argument("--transfer-transport", default="auto", choices=["auto", "rdma", "nvlink", "tcp"])
    transfer.add_argument("--transfer-fallback", default="deny", choices=["deny", "allow-tcp"])
    transfer.add_argument("--transfer-timeout", default="30s")
    transfer.add_argument("--transfer-on-failure", default="recompute", choices=[f.value for f in OnFailure])
    transfer.add_argument("--transfer-host", default="", help="address peers reach this process at")
    transfer.add_argument(
        "--transfer-crc", action="store_true", help="direct: checksum all KV, as on host memory anyway"
    )
    transfer.add_argument("--store-master", default="", help="host:port of mooncake_master")
    transfer.add_argument("--store-segment-size", default="1Gi")
    transfer.add_argument("--store-replicas", default="1")
    transfer.add_argument(
        "--store-reads", default="on", choices=["on", "off"], help="read what the pool has of a prompt, not compute it"
    )
    transfer.add_argument("--store-secret-file", default="", help="the service's secret: salts names, seals values")


def _add_chat_flags(chat: argparse._ArgumentGroup) -> None:
    chat.add_argument(
        "--control-tokens",
        default="request",
        choices=["never", "request", "always"],
        help="whether text of messages may be control tokens; request: where a request allows it",
    )
    chat.add_argument(
        "--trust-tokenizer",
        default="off",
        choices=["on", "off"],
        help="on: also one whose expressions may take very long over some texts, where no stranger sends requests",
    )
    tool_formats = ["auto", "hermes", "llama3", "mistral", "json"]
    chat.add_argument("--tool-format", default="auto", choices=tool_formats, help="auto: as the chat template shows")
    chat.add_argument("--reasoning", default="auto", choices=["auto", "think", "none"], help="splits <think> off")


def _add_router_flags(router: argparse._ArgumentGroup) -> None:
    router.add_argument("--prefill", default="", help="comma-separated host:port; a host may resolve to many pods")
    router.add_argument("--decode", default="")
    router.add_argument("--worker", default="", help="unified engines")
    policies = ["round-robin", "least-load", "prefix-aware", "kv-aware"]
    router.add_argument("--policy", default="least-load", choices=policies)
    router.add_argument("--disaggregate-above", default="0", help="shorter prompts are computed on decode")
    router.add_argument("--on-prefill-unavailable", default="local", choices=["local", "reject"])
    router.add_argument("--max-queue", default="1024")
    router.add_argument("--request-timeout", default="600s")
    router.add_argument("--discovery-interval", default="1s")
    router.add_argument("--api-key-file", default="")
    router.add_argument(
        "--tenants-file", default="", help="JSON: tenants, their keys and limits; not with a single key"
    )
    add_router_lora_flags(router)
    router.add_argument("--cors-origins", default="", help="comma-separated; web pages that may call the API, or *")
    router.add_argument("--page", default="on", choices=["on", "off"], help="a chat and the service's state at /")


def parse_serve(argv: Sequence[str]) -> EngineConfig | RouterConfig:
    """Command line of `serve` to a config. ConfigError carries all problems at once."""
    args = build_serve_parser().parse_args(argv)
    read = FlagReader(args)
    role = Role(args.role)
    server = ServerConfig(
        host=_all_addresses(args.host),
        port=read.integer("port", 0, 65535),
        drain_timeout_s=read.duration("drain_timeout"),
        no_progress_timeout_s=read.duration("no_progress_timeout"),
        log_level=args.log_level,
        metrics_port=read.integer("metrics_port", 0, 65535),
        peer_credentials=args.peer_credentials,
        api_process=args.api_process,
        max_connections=read.integer("max_connections", 1),
        max_connections_per_address=read.integer("max_connections_per_address", 1),
        max_body_memory_bytes=read.size("max_body_memory"),
        memory_limit_bytes=read.size("memory_limit") if args.memory_limit else None,
        tracing=TracingConfig(endpoint=read.endpoint("trace_endpoint"), sampling=read.fraction("trace_sampling")),
    )
    if server.metrics_port and server.metrics_port == server.port:
        read.problems.append(f"--metrics-port {server.metrics_port} is --port as well; give another, or 0")
    path = args.model.rstrip("/") or args.model
    model = ModelConfig(
        path=path,
        served_names=tuple(args.served_model_name) or (os.path.basename(path),),
        device=args.device,
        dtype=args.dtype,
        quantization=args.quantization,
        task=args.task,
        threads=read.integer("threads", 0, 4096),
        deterministic=args.deterministic == "on",
        trust_tokenizer=args.trust_tokenizer == "on",
    )
    if model.deterministic and model.quantization == "fp8":
        read.problems.append("--deterministic on: products of --quantization fp8 depend on the batch; leave one out")
    chat = ChatConfig(control_tokens=args.control_tokens, tool_format=args.tool_format, reasoning=args.reasoning)
    config: EngineConfig | RouterConfig
    if role is Role.ROUTER:
        config = _router(args, read, server, model, chat)
    else:
        config = _engine(args, read, role, server, model, chat)
    read.problems += _of_another_role(args, role)
    if not all(name.strip() for name in model.served_names):
        read.problems.append("--served-model-name '' is empty, and so is the last part of --model; give a name")
    if read.problems:
        raise ConfigError(read.problems)
    return config


def _all_addresses(host: str) -> str:
    """As they are asked for by 0.0.0.0, which leaves out a pod's own address where that is one of IPv6."""
    return "::" if host == "0.0.0.0" and ":" in pod_ip() else host


def _of_another_role(args: argparse.Namespace, role: Role) -> list[str]:
    """A problem for each flag that was given and is not for this role: who asks for a key, say, relies on it."""
    adders, readers, fix = [_add_router_flags, _add_chat_flags], "routers and unified engines", "give it to the router"
    if role is Role.ROUTER:
        adders, readers, fix = [_add_engine_flags, _add_transfer_flags], "engines", "remove it here"
    elif role is Role.UNIFIED:
        adders, readers = [_add_router_flags], "--role router"
        fix = "put a router in front (--role router --worker HOST:PORT), and give it there"
    others = argparse.ArgumentParser(add_help=False)
    for add in adders:
        add(others.add_argument_group())
    return [
        f"--{name.replace('_', '-')} is read by {readers} alone, not by --role {role.value}: {fix}"
        for name, default in vars(others.parse_args([])).items()
        if getattr(args, name) != default
    ]


def _router(
    args: argparse.Namespace, read: FlagReader, server: ServerConfig, model: ModelConfig, chat: ChatConfig
) -> RouterConfig:
    config = RouterConfig(
        server=server,
        model=model,
        chat=chat,
        prefill=_items(args.prefill),
        decode=_items(args.decode),
        worker=_items(args.worker),
        policy=args.policy,
        disaggregate_above=read.integer("disaggregate_above", 0),
        on_prefill_unavailable=args.on_prefill_unavailable,
        max_queue=read.integer("max_queue", 1),
        request_timeout_s=read.duration("request_timeout"),
        discovery_interval_s=read.duration("discovery_interval"),
        tenants_file=args.tenants_file,
        api_key_file=args.api_key_file,
        cors_origins=_items(args.cors_origins),
        page=args.page == "on",
        lora_updates=args.lora_updates == "on",
    )
    if config.lora_updates and config.tenants_file:
        read.problems.append("--lora-updates on and --tenants-file exclude each other: adapters are for all tenants")
    if not config.worker and not config.decode:
        read.problems.append(
            "--role router needs --worker, or --decode with --prefill: there is no engine to send requests to"
        )
    if config.worker and (config.decode or config.prefill):
        read.problems.append("--worker (unified) and --prefill/--decode exclude each other; give one of the two")
    if config.tenants_file and config.api_key_file:
        read.problems.append("--tenants-file and --api-key-file exclude each other; make the key that of a tenant")
    if config.prefill and not config.decode:
        read.problems.append("--prefill needs --decode: no engine would generate")
    for flag in ("prefill", "decode", "worker"):
        for address in getattr(config, flag):
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
                read.problems.append(f"--{flag} {address!r} is not host:port with a port of 1 to 65535")
    return config


def _engine(
    args: argparse.Namespace, read: FlagReader, role: Role, server: ServerConfig, model: ModelConfig, chat: ChatConfig
) -> EngineConfig:
    transfer = _transfer(args, read, role, server)
    speculative = read.integer("speculative_tokens", 1, 64)
    ranks = read.integer("tensor_parallel_size", 1, 64)
    _refuse_together(args, read, role, ranks, transfer, model)
    lora, problems = read_lora(args, model.served_names)
    read.problems += problems
    override = read.integer("num_blocks_override", 1) if args.num_blocks_override else None
    return EngineConfig(
        role=role,
        server=server,
        model=model,
        kv=KvConfig(
            block_size=read.integer("block_size", 1, 1024),
            dtype=args.kv_dtype,
            memory_bytes=read.size("kv_memory") if args.kv_memory else None,
            memory_fraction=read.fraction("kv_memory_fraction"),
            num_blocks_override=override,
            prefix_caching=not args.no_prefix_caching,
            layout=args.kv_layout,
        ),
        scheduler=SchedulerConfig(
            max_model_len=None if args.max_model_len == "auto" else read.integer("max_model_len", 2),
            max_batched_tokens=read.integer("max_batched_tokens", 1),
            max_step_s=read.duration("max_step_time"),
            max_num_seqs=read.integer("max_num_seqs", 1, 65536),
            speculative_tokens=0 if args.speculative_method == "none" else speculative,
            max_waiting=read.integer("max_waiting", 1),
            queue_timeout_s=read.duration("queue_timeout"),
        ),
        transfer=transfer,
        chat=chat,
        lora=lora,
        tensor_parallel_size=ranks,
        draft_model=args.speculative_model,
        executor=args.executor,
    )


def _transfer(args: argparse.Namespace, read: FlagReader, role: Role, server: ServerConfig) -> TransferConfig:
    transfer = TransferConfig(
        mode=args.transfer_mode,
        transport=args.transfer_transport,
        fallback=args.transfer_fallback,
        timeout_s=read.duration("transfer_timeout"),
        on_failure=OnFailure(args.transfer_on_failure),
        host=args.transfer_host or pod_ip() or server.host,
        verify_crc=args.transfer_crc,
        store=StoreConfig(
            master=args.store_master,
            segment_bytes=read.size("store_segment_size"),
            replicas=read.integer("store_replicas", 1),
            reads=args.store_reads == "on",
            secret_file=args.store_secret_file,
        ),
    )
    if transfer.mode != "store" and not transfer.store.reads:
        read.problems.append(f"--store-reads off: with --transfer-mode {transfer.mode} there is no pool; leave it out")
    if transfer.mode == "store" and not transfer.store.master:
        read.problems.append("--transfer-mode store needs --store-master host:port of a mooncake_master")
    if role is not Role.UNIFIED and transfer.mode == "none":
        read.problems.append(f"--role {role.value} needs --transfer-mode direct or store")
    return transfer


def _refuse_together(
    args: argparse.Namespace, read: FlagReader, role: Role, ranks: int, transfer: TransferConfig, model: ModelConfig
) -> None:
    """A problem for each pair of settings of an engine that exclude each other."""
    if role is not Role.UNIFIED and args.task in ("embed", "score"):
        read.problems.append(
            f"--task {args.task} does not go with --role {role.value}: a prompt that ends where it is computed has no "
            "KV to hand over; use --role unified"
        )
    if (args.speculative_method == "model") != bool(args.speculative_model):
        read.problems.append(
            "--speculative-method model and --speculative-model PATH go together: give both or neither"
        )
    against = {"--role prefill": role is Role.PREFILL, "--executor fake": args.executor == "fake"}
    against[f"--tensor-parallel-size {ranks}"] = ranks > 1
    if args.speculative_model:
        read.problems += [f"--speculative-model does not go with {flag}" for flag, given in against.items() if given]
    if args.kv_layout != "block-major" and transfer.mode != "none":
        read.problems.append(
            f"--kv-layout {args.kv_layout} does not go with --transfer-mode {transfer.mode}: it scatters a block over "
            "all layers, and a transfer moves blocks as one run; use block-major"
        )
    if ranks > 1 and transfer.mode == "store":
        read.problems.append(
            f"--tensor-parallel-size {ranks} does not go with --transfer-mode store: only the first rank's KV would "
            "be stored; use direct, or 1"
        )
    if ranks > 2 and model.deterministic:  # of two summands there is one sum, whoever makes it
        read.problems.append(
            f"--deterministic on: NCCL orders the sums of --tensor-parallel-size {ranks}; 2 at most go with it"
        )
    if ranks > 1 and args.executor == "fake":
        read.problems.append(f"--tensor-parallel-size {ranks} does not go with --executor fake, which has no ranks")

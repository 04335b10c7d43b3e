"""`isthmus-runtime`: one command line. Imports per command, so that the router needs no torch.

serve --role prefill|decode|unified|router    run one role
kv-plan FILE                                  the KV arithmetic on a JSON file
model import|fetch|verify                     put a model directory in place, or check it
bench                                         load one endpoint and report
simulate                                      proof runs and capacity planning
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence

from .errors import ConfigError, IsthmusError

USAGE = __doc__ or ""


def _serve(argv: Sequence[str]) -> int:
    from .config import RouterConfig
    from .serve_flags import parse_serve

    config = parse_serve(argv)
    if isinstance(config, RouterConfig):
        _log_to_stderr(config.server.log_level)
        from .commands.serve_router import serve_router

        return serve_router(config)
    from .commands.engine_process import EngineProcess, runs_apart

    apart = runs_apart(config)
    _log_to_stderr(config.server.log_level, "API process: " if apart else "")
    # Before all imports of the HTTP side: the engine reads weights meanwhile.
    process = EngineProcess(config) if apart else None
    from .commands.serve_engine import serve_engine

    return serve_engine(config, process)


def _log_to_stderr(level: str, who: str = "") -> None:
    text = f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=text, stream=sys.stderr)


def _kv_plan(argv: Sequence[str]) -> int:
    from .kv.plan import kv_plan_main

    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: isthmus-runtime kv-plan FILE", file=sys.stderr)
        return 2
    return kv_plan_main(argv[0])


def _model(argv: Sequence[str]) -> int:
    from .commands.model import model_main

    return model_main(argv)


def _bench(argv: Sequence[str]) -> int:
    from .commands.bench import bench_main

    return bench_main(argv)


def _simulate(argv: Sequence[str]) -> int:
    from .commands.simulate import simulate_main

    return simulate_main(argv)


def _engine(argv: Sequence[str]) -> int:
    """Started by `serve --api-process on`, not by people: not in the usage."""
    from .commands.engine_process import engine_main

    engine_main(argv)


def _rank(argv: Sequence[str]) -> int:
    """Started by `serve --tensor-parallel-size`, not by people: not in the usage."""
    from .commands.ranks import rank_main

    return rank_main()


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": _serve,
    "engine": _engine,
    "rank": _rank,
    "kv-plan": _kv_plan,
    "model": _model,
    "bench": _bench,
    "simulate": _simulate,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 2 for a wrong command line or configuration, 1 for a failure at run time."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if args else 2
    command = COMMANDS.get(args[0])
    if command is None:
        print(f"isthmus-runtime: unknown command {args[0]!r}; one of: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return command(args[1:])
    except ConfigError as error:
        for problem in error.problems:
            print(f"isthmus-runtime {args[0]}: {problem}", file=sys.stderr)
        return 2
    except IsthmusError as error:
        print(f"isthmus-runtime {args[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

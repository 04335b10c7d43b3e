"""Runs a Supervisor over pods given as JSON, as `isthmus up` would: the process the tests start, signal and kill."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from isthmus_operator.errors import LaunchError
from isthmus_operator.local.console import Console
from isthmus_operator.local.pods import Container, Pod, Probe
from isthmus_operator.local.process import Policy
from isthmus_operator.local.supervisor import Launch, Supervisor

HTTP = {"port": 8001, "path": "/health", "period_s": 0.5, "failure_threshold": 40, "timeout_s": 5.0}


def container(raw: dict[str, Any]) -> Container:
    probes = {name: Probe(**(HTTP | raw[name])) for name in ("startup", "readiness", "liveness") if name in raw}
    return Container(name="main", argv=tuple(raw["argv"]), env=raw.get("env", {}), ports={"http": 8001}, **probes)


def main() -> int:
    plan = json.loads(sys.argv[1])
    console = Console(sys.stdout, quiet=False)
    pods = [
        Pod(
            name=raw["name"],
            role=raw["role"],
            address=raw["address"],
            init=tuple(container(one) for one in raw.get("init", [])),
            containers=(container(raw),),
            restart=True,
            grace_s=raw.get("grace_s", 20.0),
            files={},
            folders=(),
            needs=(),
        )
        for raw in plan["pods"]
    ]
    launch = Launch(
        name="test",
        namespace="default",
        url="http://127.0.0.1:8001",
        pods=pods,
        run_dir=Path(plan["run_dir"]),
        environment=dict(os.environ),
        find_program=shutil.which,
        announce=lambda: console.say("ALL READY"),
        console=console,
        policy=Policy(**plan.get("policy", {})),
    )

    async def run() -> int:
        return await Supervisor(launch).run()

    try:
        return asyncio.run(run())
    except LaunchError as error:
        print(f"CANNOT START {error}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""Builds, starts and stops the Kubernetes cluster for tests: `python tests/cluster/cluster.py up|down|status|build`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # The folder of a script is not searched in Python's safe-path mode, which the Makefile turns on.
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from testcluster.cli import main

    sys.exit(main())

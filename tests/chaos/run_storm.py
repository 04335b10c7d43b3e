"""A storm of real faults over a real service: `python tests/chaos/run_storm.py --seed 1 --minutes 10 --mode direct`.

See docs/chaos.md. Exit status 0: every guarantee held.
"""

import os
import shutil
import sys
from pathlib import Path

_ENTERED = "ISTHMUS_CHAOS_NETWORK"

if __name__ == "__main__":
    # The folder of a script is not searched in Python's safe-path mode, which the Makefile turns on.
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here / "storm"), str(here.parent / "support")]
    able = os.geteuid() == 0 and all(map(shutil.which, ("unshare", "nsenter", "mount", "ip", "nft", "tc")))
    if able and _ENTERED not in os.environ:
        os.environ[_ENTERED] = "1"
        os.execvp("unshare", ["unshare", "--net", "--mount", sys.executable, *sys.argv])
    if not able:
        print("chaos: NO NETWORK FAULTS: they need root, iproute2, nftables and util-linux", file=sys.stderr)
    from storm_cli import main

    sys.exit(main(sys.argv[1:], network=able))

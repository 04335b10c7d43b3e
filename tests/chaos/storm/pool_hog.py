"""Fills or churns the storage pool: `python pool_hog.py HOST MASTER fill|churn|free SECONDS`.

fill: pinned values until there is no space, kept full for SECONDS. churn: values that push others out, for SECONDS.
free: removes all of them. Prints a line when the pool is as asked.
"""

from __future__ import annotations

import sys
import time

_VALUE = bytes(1 << 20)
_NO_SPACE = -200


def main(host: str, master: str, what: str, seconds: float) -> int:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    store = MooncakeDistributedStore()
    if store.setup(host, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master):
        return 1
    if what == "free":
        return 0 if store.remove_by_regex("^hog:", True) >= 0 else 1
    pinned = ReplicateConfig()
    pinned.replica_num = 1
    pinned.with_hard_pin = what == "fill"
    end = time.monotonic() + seconds
    number, told = 0, False
    while time.monotonic() < end:
        # Smaller and smaller, so that no block fits when it says there is no space.
        size = len(_VALUE)
        code = store.put(f"hog:{what}:{number}", _VALUE, pinned)
        number += 1
        while what == "fill" and code == _NO_SPACE and size > 256:
            size //= 4
            while store.put(f"hog:{what}:{number}", _VALUE[:size], pinned) == 0:
                number += 1
        if not told and (what == "churn" or code != 0):
            print("ready", flush=True)
            told = True
        time.sleep(0.02 if what == "churn" else 0.1)
    store.remove_by_regex("^hog:", True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))

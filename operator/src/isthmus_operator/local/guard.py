"""Run as a file, not imported: kills what is left when the supervisor dies, whatever way it dies.

    python -I -S guard.py        reads lines `+GROUP` and `-GROUP` from its input

child.py ends each container's first process; this one ends what such processes have started themselves. It notices
the death of the supervisor by the end of its input, which no signal can suppress.
"""

import os
import signal
import sys


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    # A Ctrl-C in the terminal is for the supervisor, which stops the pods in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()

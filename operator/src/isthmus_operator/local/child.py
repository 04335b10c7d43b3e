"""Run as a file, not imported: becomes a container's process that cannot outlive its supervisor.

    python -I -S child.py SUPERVISOR_PID PROGRAM ARGUMENT...

The kernel sends SIGKILL to this process when the supervisor dies, however it dies; the setting survives exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    supervisor, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    # The supervisor may have died before the line above took effect.
    if os.getppid() != supervisor:
        sys.exit("the supervisor is gone")
    os.execv(program[0], program)


if __name__ == "__main__":
    main()

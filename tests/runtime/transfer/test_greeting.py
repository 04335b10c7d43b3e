"""The greeter when descriptors are short: it has to be there when they no longer are."""

import subprocess
import sys

from isthmus_runtime.transfer.greeting import greeting_problem

PROCESS = """
import os, resource, sys
from isthmus_runtime.transfer.greeting import Greeter
greeter = Greeter("127.0.0.1", "epoch-1", lambda claim: "")
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print(greeter.address, flush=True)
sys.stdin.readline()
for fd in held:
    os.close(fd)
print("well again", flush=True)
sys.stdin.readline()
"""


def test_a_greeter_survives_a_time_without_descriptors() -> None:
    """A Direct transfer began with a greeting that would never come again, and the process looked well."""
    argv = [sys.executable, "-c", PROCESS]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            address = process.stdout.readline().strip()
            assert greeting_problem(address, b"claim", "epoch-1", 0.5), "there is no descriptor to answer with"
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "well again\n"
            assert greeting_problem(address, b"claim", "epoch-1", 20.0) == ""
            _, errors = process.communicate("\n", timeout=20)
        finally:
            process.kill()
    assert errors.count("could not be greeted") == 1

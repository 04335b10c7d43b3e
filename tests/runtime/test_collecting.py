"""The collector of cycles leaves alone what a process has when it begins to serve."""

from __future__ import annotations

import subprocess
import sys

_LOOK = """
import gc
import weakref

from isthmus_runtime import errors
from isthmus_runtime.collecting import spare_collector


class Node:
    pass


def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


gc.disable()
before = cycle()
gc.enable()
spare_collector()
assert before() is None, "what is garbage already would be kept for good"
left = gc.get_objects()
assert not any(each is vars(errors) for each in left), "a module's contents are looked at again"
print(gc.get_freeze_count(), len(left))
gc.disable()
after = cycle()
gc.collect()
assert after() is None, "a cycle of later is found"
"""


def test_what_is_there_is_not_looked_at_again_and_later_cycles_are_found() -> None:
    found = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=60, check=True)
    frozen, left = map(int, found.stdout.split())
    assert frozen > 100 * left

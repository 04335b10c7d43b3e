"""Holds compiled kernels to the rules of `isthmus_kernels.dependent_launch`."""

import re

READ_WEIGHTS_FIRST = frozenset({"_one_row", "_rms_norm"})
"""Kernels that may read before they wait: weights."""

_WAIT = "griddepcontrol.wait"
_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z_]+(?:\.[a-z0-9_:]+)*)", re.MULTILINE)
_LEAVES = {"bra": "a branch", "brx": "a branch", "ret": "a return", "exit": "a return", "call": "a call"}
_WRITES = ("st.global", "atom", "red", "cp.async", "cp.reduce")
_READS = ("ld.global", "ld.volatile", "ld.relaxed", "ld.acquire", "cp.async")


def broken(name: str, ptx: str, launched_early: bool) -> list[str]:
    """What is wrong with the kernel `name`; `launched_early`: with Triton's `launch_pdl`."""
    if launched_early != (_WAIT in ptx):
        return [f"{name}: is launched early and never waits" if launched_early else f"{name}: waits for nothing"]
    if not launched_early:
        return []
    found = []
    body = re.sub(r"//.*", "", ptx[ptx.index("{") :])
    for match in _INSTRUCTION.finditer(body[: body.index(_WAIT)]):
        what = match[1]
        if what.split(".")[0] in _LEAVES:
            found.append(f"{name}: {_LEAVES[what.split('.')[0]]} before the wait ({what})")
        elif what.startswith(_WRITES):
            found.append(f"{name}: a write before the wait ({what})")
        elif what.startswith(_READS) and name not in READ_WEIGHTS_FIRST:
            found.append(f"{name}: a read before the wait ({what})")
    return found

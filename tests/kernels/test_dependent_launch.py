"""Kernels that start before the one before them has ended: who may be launched so, and the rules that they keep.

The compiled kernels are held to the rules by tests/support/compile_kernels.py, which test_triton.py runs; what they
leave on a card is in tests/gpu/test_dependent_launch.py.
"""

import pytest
import torch
from dependent_launch_rules import broken

from isthmus_kernels import dependent_launch

HEAD = ".visible .entry kernel(.param .u64 out)\n{\n\tld.param.b64 %rd1, [out];\n"
WAIT = "\t// begin inline asm\n\tgriddepcontrol.wait; // dummy %r1\n\t// end inline asm\n"
READ, WRITE, LEAVE = "\t@%p1 ld.global.v4.b32 {%r1}, [%rd1];\n", "\tst.global.b32 [%rd1], %r1;\n", "\t@!%p2 bra $L1;\n"


@pytest.mark.parametrize(
    ("body", "name", "wrong"),
    [
        (WAIT + READ + WRITE + LEAVE, "any", []),
        (READ + WAIT + WRITE, "_one_row", []),
        (READ + WAIT + WRITE, "any", ["any: a read before the wait (ld.global.v4.b32)"]),
        (WRITE + WAIT, "_one_row", ["_one_row: a write before the wait (st.global.b32)"]),
        ("\tatom.global.add.u32 %r1;\n" + WAIT, "any", ["any: a write before the wait (atom.global.add.u32)"]),
        (LEAVE + WAIT, "any", ["any: a branch before the wait (bra)"]),
        ("\t@%p1 ret;\n" + WAIT, "any", ["any: a return before the wait (ret)"]),
        (READ + WRITE, "any", ["any: is launched early and never waits"]),
    ],
)  # fmt: skip
def test_rules(body: str, name: str, wrong: list[str]) -> None:
    assert broken(name, HEAD + body + "}", True) == wrong


def test_a_kernel_that_is_launched_in_order_need_not_wait() -> None:
    assert broken("any", HEAD + READ + "}", False) == []
    assert broken("any", HEAD + WAIT + READ + "}", False) == ["any: waits for nothing"]


def test_only_where_it_was_switched_on_and_only_on_hopper_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = {0: (8, 9), 1: (9, 0), 2: (10, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[device.index])
    devices = [torch.device(name) for name in ("cpu", "cuda:0", "cuda:1", "cuda:2")]
    dependent_launch.supported.cache_clear()
    try:
        assert not any(dependent_launch.options(device)["launch_pdl"] for device in devices)
        for device in devices:
            dependent_launch.switch(device, True)
        found = [dependent_launch.options(device) for device in devices]
        assert found == [{"PDL": on, "launch_pdl": on} for on in (False, False, True, True)]
        dependent_launch.switch(devices[2], False)
        assert [dependent_launch.options(device)["PDL"] for device in devices] == [False, False, False, True]
    finally:
        for device in devices:
            dependent_launch.switch(device, False)
        dependent_launch.supported.cache_clear()

"""A sequence of ops is replayed when all of it was recorded, and run op by op when torch computed a part of it."""

from __future__ import annotations

import pytest
import torch

from isthmus_kernels import dispatch, native
from isthmus_runtime.executor.replay import Replay

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled library is not built")


@pytest.mark.parametrize("torch_computes", [False, True])
def test_only_whole_recordings_are_replayed(torch_computes: bool) -> None:
    replay, runs = Replay(), 0
    x, gated, out = torch.randn(2, 16), torch.empty(2, 8), torch.empty(2, 8)

    def body() -> None:
        nonlocal runs
        runs += 1
        # Views and scratch compute nothing.
        dispatch.silu_mul(x[:2], out=gated)
        if torch_computes:
            gated.mul_(2)
        dispatch.rms_norm(gated.view(2, 8), torch.empty(8).fill_(1) if torch_computes else weight, 1e-5, out=out)

    weight = torch.ones(8)
    with torch.inference_mode():
        for run in range(3):
            x.normal_()
            replay.run(1, body)
            got = out.clone()
            body()
            assert torch.equal(got, out)
            assert runs == (2 * run + 2 if torch_computes else run + 2)

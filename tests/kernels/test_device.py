"""Scratch of the Triton launchers: made once, kept for graphs, and never made inside one."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from isthmus_kernels import device

CPU = torch.device("cpu")


def test_the_same_buffer_every_time() -> None:
    first = device.scratch("test", CPU, (3, 4), torch.int32)
    assert first.count_nonzero() == 0
    first.fill_(7)
    assert device.scratch("test", CPU, (3, 4), torch.int32) is first
    assert device.scratch("test", CPU, (4, 4), torch.int32) is not first


def test_threads_of_one_owner_share_what_others_have_beside_it() -> None:
    def scratch(owner: int) -> torch.Tensor:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(device.own_scratch, owner).result()
            return thread.submit(device.scratch, "owned", CPU, (3,), torch.int32).result()

    assert scratch(1) is scratch(1) and scratch(2) is not scratch(1)
    assert device.scratch("owned", CPU, (3,), torch.int32) is not scratch(1)


def test_not_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run the op once before capturing"):
        device.scratch("test", torch.device("cuda", 0), (5,), torch.int32)


@pytest.mark.parametrize(("count", "least", "want"), [(0, 1, 1), (1, 1, 1), (3, 1, 4), (4, 1, 4), (5, 16, 16)])
def test_power_of_two(count: int, least: int, want: int) -> None:
    assert device.power_of_two(count, least) == want

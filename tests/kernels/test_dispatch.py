"""The choice of implementation: by name, by capability, logged once, and without the compiled library."""

import logging
import subprocess
import sys

import pytest
import torch

from isthmus_kernels import dispatch, native, selection

WITHOUT_LIBRARY = """
import logging, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
from pathlib import Path
exists = Path.exists
Path.exists = lambda path: exists(path) and not path.name.startswith("_cpu")
import torch
from isthmus_kernels import dispatch, dispatch_logits, dispatch_weights, native
assert not native.available()
x = torch.randn(3, 8)
dispatch.rms_norm(x, torch.ones(8), 1e-5)
dispatch.silu_mul(x)
dispatch_logits.sample(x)
packed = dispatch_weights.pack(torch.randn(4, 8).bfloat16(), dtype=torch.float32)
assert dispatch.linear(x, packed).shape == (3, 4)
from isthmus_kernels.testing import paged_case
case = paged_case([1], [3], heads=2, kv_heads=1, head_dim=32, block_size=8)
dispatch.paged_attention(case.q, case.kv, case.block_tables, case.query_start_loc, case.seq_lens,
                         scale=1.0, max_query_len=1, max_seq_len=4)
"""


@pytest.mark.slow
def test_everything_works_without_the_library_and_says_so_once() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_LIBRARY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "WARNING" in line]
    assert len(lines) == 1 and "not compiled" in lines[0]


def test_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    selection.select.cache_clear()
    with caplog.at_level(logging.INFO, logger="isthmus_kernels.selection"):
        for _ in range(3):
            dispatch.silu_mul(torch.ones(1, 4))
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("silu_mul on cpu: ")


def test_unknown_implementation_is_named() -> None:
    with pytest.raises(ValueError, match="impl: 'gpu' cannot run silu_mul on cpu"):
        dispatch.silu_mul(torch.ones(1, 4), impl="gpu")


def test_a_peer_is_used_only_where_it_is_asked_for_and_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "find_spec", lambda name: object())
    assert selection.usable("flashinfer", "cuda", "flashinfer")
    assert not selection.usable("flashinfer", "cuda", None)
    assert not selection.usable("flashinfer", "cpu", "flashinfer")
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    assert not selection.usable("flashinfer", "cuda", "flashinfer")


@pytest.mark.skipif(not native.available(), reason="the compiled library is not built")
def test_every_instruction_set_of_the_library_agrees() -> None:
    best = ["base", "avx2", "avx512"].index(str(native.level()))
    weight, x = torch.randn(50, 70), torch.randn(9, 70)
    for level in ["base", "avx2", "avx512"][: best + 1]:
        width = native.entry("linear_panel_width", "", at_level=level).query()
        panels = torch.empty(-(-50 // width) * width * 70)
        pack = native.entry("linear_pack", "5q", at_level=level)
        pack((panels, weight), panels.data_ptr(), weight.data_ptr(), 50, 70, 0)
        out = torch.full((9, 50), float("nan"))
        linear = native.entry("linear", "11q", at_level=level)
        linear((out, x, panels), out.data_ptr(), x.data_ptr(), panels.data_ptr(), 0, 9, 50, 70, 70, 50, 0, 0)
        torch.testing.assert_close(out, x @ weight.T, rtol=1e-4, atol=1e-4)
        silu = torch.full((9, 35), float("nan"))
        native.entry("silu_mul", "7q", at_level=level)((silu, x), silu.data_ptr(), x.data_ptr(), 9, 35, 35, 70, 0)
        torch.testing.assert_close(silu, dispatch.silu_mul(x, impl="reference"), rtol=1e-4, atol=1e-5)

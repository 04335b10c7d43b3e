"""What of the CUDA gated product needs no card: its tiles, what it refuses, and the two ops that stand for it."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compiled_cuda import assert_in_registers, check_layout, hopper_code
from torch import Tensor

from isthmus_kernels import dispatch, dispatch_weights
from isthmus_kernels.linear import cuda_impl
from isthmus_kernels.linear.packed import PackedLinear
from isthmus_kernels.testing import assert_close, poisoned

BF16 = torch.bfloat16


def test_layout(tmp_path: Path) -> None:
    check_layout(Path(__file__).parent / "gated_layout_check.cpp", tmp_path)


@pytest.mark.slow
def test_machine_code_keeps_everything_in_registers() -> None:
    """A thread holds up to 128 sums: through local memory, or where a product waits for the last, they are slow."""
    kernels = hopper_code("gated_product")
    assert len(kernels) == 2, "one a width of tiles, for sm_90a"
    assert sorted((k.count("HGMMA.64x256x16"), k.count("HGMMA.64x192x16")) for k in kernels) == [(0, 4), (4, 0)]
    for kernel in kernels:
        assert "UTMALDG.2D.MULTICAST" in kernel and "UTMASTG" in kernel and "USETMAXREG" in kernel
        assert_in_registers(kernel)


def refusal(
    *,
    columns: int = 128,
    outputs: int = 64,
    dtype: torch.dtype = BF16,
    weight_dtype: torch.dtype = BF16,
    pad: int = 0,
    shift: int = 0,
    capability: tuple[int, int] = (9, 0),
) -> str | None:
    wide = columns + pad
    x = torch.empty(4 * wide + 8, dtype=dtype)[shift : shift + 4 * wide].view(4, wide)[:, :columns]
    weight = torch.empty(outputs, columns, dtype=weight_dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return cuda_impl.refusal(x, weight, torch.empty(4, outputs // 2, dtype=dtype))


def test_slices_are_taken() -> None:
    assert refusal() is None
    assert refusal(pad=8) is None
    assert refusal(outputs=16, columns=64) is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dtype": torch.float32}, "torch.float32"),
        ({"weight_dtype": torch.float16}, "torch.float16"),
        ({"columns": 96}, "96 columns"),
        ({"columns": 0}, "0 columns"),
        ({"pad": 4}, "multiples of 16"),
        ({"outputs": 8}, "multiples of 16"),
        ({"shift": 4}, "multiple of 16"),
        ({"capability": (10, 0)}, "capability 9.0"),
    ],
)
def test_what_the_kernel_cannot_take_is_named(arguments: dict[str, object], reason: str) -> None:
    found = refusal(**arguments)  # type: ignore[arg-type]
    assert found is not None and reason in found


def test_tiles_of_little_use_are_left_to_the_two_ops() -> None:
    """The shape of Qwen3-8B on an H200, by what was measured there (runtime/bench/LOG.md)."""
    best = {
        None: (0, 1, 128, 192, 384, 640, 896),
        96: (256, 768, 1280, 1792),
        128: (512, 1000, 1024, 2048, 3000, 4096, 6000, 8192),
    }
    assert {rows: cuda_impl.useful_tile(rows, 12_288, 132) for tile in best for rows in best[tile]} == {
        rows: tile for tile in best for rows in best[tile]
    }
    assert cuda_impl.use(0, 12_288, 128, 132) == 0
    assert cuda_impl.use(8192, 12_288, 128, 132) == pytest.approx(3072 / (47 * 66))
    assert cuda_impl.use(256, 12_288, 96, 132) == pytest.approx(128 / 132)


@pytest.mark.parametrize("with_scratch", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 5, 33])
def test_gated_product_is_that_of_the_two_ops(rows: int, with_scratch: bool) -> None:
    weight = torch.randn(2 * 24, 40) / 6
    x = torch.randn(rows, 40)
    out = poisoned(rows, 24 + 3)[:, :24]
    scratch = poisoned(rows, 48) if with_scratch else None
    packed = dispatch_weights.pack(weight)
    assert dispatch.linear_silu_mul(x, packed, scratch=scratch, out=out) is out
    gate, up = (x @ weight.T).chunk(2, dim=1)
    assert_close(out, torch.nn.functional.silu(gate) * up)


@dataclass(frozen=True)
class Fusing:
    """A weight that says whether it took the activation upon itself."""

    takes: bool
    nbytes: int = 0

    def apply(self, x: Tensor, out: Tensor | None) -> Tensor:
        result = torch.ones(x.shape[0], 4)
        return result if out is None else out.copy_(result)

    def outputs_from(self, first: int) -> None:
        return None

    def apply_silu_mul(self, x: Tensor, out: Tensor) -> bool:
        if self.takes:
            out.fill_(7.0)
        return self.takes


@pytest.mark.parametrize("takes", [True, False])
def test_a_weight_may_take_the_activation_upon_itself(takes: bool) -> None:
    packed = PackedLinear(in_features=3, out_features=4, weight_dtype=torch.float32, weight=Fusing(takes))
    out = dispatch.linear_silu_mul(torch.ones(2, 3), packed, out=poisoned(2, 2))
    assert_close(out, torch.full((2, 2), 7.0 if takes else torch.nn.functional.silu(torch.ones(())).item()))


def test_a_width_that_does_not_match_is_named() -> None:
    with pytest.raises(ValueError, match=r"out: expected \[T, 6 / 2\], got \(2, 4\)"):
        dispatch.linear_silu_mul(torch.ones(2, 3), dispatch_weights.pack(torch.ones(6, 3)), out=torch.ones(2, 4))

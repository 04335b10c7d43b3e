"""How a rotary position embedding turns. Torch-free, so that a configuration can be read without torch."""

from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding: base frequency, and how it is stretched to longer contexts.

    kind: `default`; `linear` (positions divided by `factor`); `llama3` (low frequencies divided by `factor`, high ones
    kept, in between interpolated: the Llama 3.1 release).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

"""How a rotary position embedding turns. Torch-free, so that a configuration can be read without torch."""

from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021): base frequency, and how it is stretched to longer contexts.

    Kinds:
        default: not stretched.
        linear: positions divided by `factor` (Chen et al. 2023).
        dynamic: the base grows with the length past `original_max_position` ("dynamic NTK").
        yarn: low frequencies divided by `factor`, high ones kept, in between interpolated (Peng et al. 2023).
        longrope: a divisor for each frequency, others for contexts past `original_max_position` (Ding et al. 2024).
        llama3: yarn's idea with other bounds (the Llama 3.1 release).

    The frequencies of `dynamic` and `longrope` follow from the longest sequence that an engine serves, not from each
    request's: keys are cached by position and shared, so that all must be turned alike.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    """llama3: wavelengths above `original_max_position` over this are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below `original_max_position` over this are kept."""
    original_max_position: int = 8192
    """Tokens that the model was trained for before it was stretched."""
    partial: float = 1.0
    """Share of a head's channels that turn: the first ones."""
    attention_factor: float = 1.0
    """On cosines and sines."""
    beta_fast: float = 32.0
    """yarn: frequencies that turn more often within `original_max_position` are kept."""
    beta_slow: float = 1.0
    """yarn: those that turn less often are divided by `factor`."""
    truncate: bool = True
    """yarn: the bounds between kept and divided are rounded outwards to whole channels."""
    short_factors: tuple[float, ...] = ()
    """longrope: a divisor per channel pair, up to `original_max_position`."""
    long_factors: tuple[float, ...] = ()
    """longrope: as `short_factors`, for longer contexts."""

    def rotated(self, head_dim: int) -> int:
        """How many channels of a head turn."""
        return int(head_dim * self.partial)

    def variant(self, max_len: int) -> str | None:
        """What the frequencies depend on besides this record, when the longest sequence has `max_len` tokens: engines
        whose answers differ make different keys. None: nothing."""
        if self.kind == "dynamic":
            return f"dynamic:{max(max_len, self.original_max_position)}"
        if self.kind == "longrope":
            return f"longrope:{'long' if max_len > self.original_max_position else 'short'}"
        return None

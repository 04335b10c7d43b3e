"""A grammar for tests: stretches of forced tokens, which depend on what was drawn before them."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus_runtime.interfaces.steps import Forced, LateMask, Later


class Stretches:
    """After each token divisible by 3 the next few are forced, by that token; others are free. `Masks`, at once."""

    def __init__(self, *, tells: bool) -> None:
        self.tells = tells
        self.asked: tuple[int, ...] = ()
        self.most = 0

    def next(self, generated: Sequence[int]) -> int | None:
        """What must follow; None: anything."""
        at = max((at for at, token in enumerate(generated) if token % 3 == 0), default=-99)
        since = len(generated) - 1 - at
        if at < 0 or since > generated[at] % 5:
            return None
        return 301 + 3 * since + generated[at] % 2

    def mask(self, generated: Sequence[int]) -> bytes:
        must = self.next(generated)
        return b"\xff" * 125 if must is None else (1 << must).to_bytes(125, "little")

    def allowed(self, generated: Sequence[int], most: int = 0) -> bytes:
        if len(generated) != len(self.asked):
            self.asked, self.most = tuple(generated), most
        return self.mask(generated)

    def forced(self) -> Forced:
        tokens, masks = list(self.asked), list[bytes]()
        while self.tells and len(masks) < max(1, self.most) and (token := self.next(tokens)) is not None:
            tokens.append(token)
            masks.append(self.mask(tokens))
        return Forced(tuple(tokens[len(self.asked) :]), tuple(masks) if self.most else ())

    def late(self, count: int) -> LateMask:
        return Soon(self)

    def drop(self) -> None:
        pass


class Soon:
    """Comes once its token was seen; here that is never before the step runs."""

    def __init__(self, masks: Stretches) -> None:
        self.masks = masks

    def wait(self, patience_s: float) -> Later:
        return Later.MASK

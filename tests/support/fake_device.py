"""A device for tests: its memory is the host's, but its work runs as late as it may, and captures as a GPU does.

What is enqueued runs when somebody waits for an event after it, on the waiting thread. A captured body keeps the
tensors and numbers it was captured with. Staging is garbage when it is handed out and again once the work that used it
has run, so that a value which a step did not write itself is seen.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

Body = Callable[[], None]
_GARBAGE = -0x5A5A5A5A


class FakeEvent:
    """Runs the work before it when it is waited for."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.happened = False

    def done(self) -> bool:
        return self.happened

    def wait(self) -> None:
        self._device.run_until(self)


class FakeDevice:
    """`executor.device.base.Device`. `sizes` and `token_sizes` are captured ahead, up to `met_tokens` as they come."""

    name = "cpu"
    torch_device = torch.device("cpu")
    dtype_varies = False
    multiplies_fp8 = False
    multiplies_mxfp4 = False
    reads_fp8 = True

    def __init__(
        self, sizes: tuple[int, ...] = (1, 2, 4, 8), token_sizes: tuple[int, ...] = (), met_tokens: int = 0
    ) -> None:
        self._sizes = sizes
        self.met_tokens = met_tokens
        self._token_sizes = token_sizes
        self._work: deque[Body | FakeEvent] = deque()
        self._running = threading.Lock()
        self._staging: set[int] = set()
        self._used: list[Tensor] = []
        self._memories: dict[tuple[int, int], int] = {}
        self.captured = 0
        self.replayed = 0
        self.allocations = 0
        self.fail_with: BaseException | None = None
        """Raised by the next work that runs, as a GPU reports an error of a kernel: later, to whoever waits."""

    def enter(self) -> None:
        torch.set_num_threads(2)

    def dtype(self, requested: str) -> torch.dtype:
        return torch.float32

    def kv_bytes(self, fraction: float, beside: int = 0) -> int:
        return int(fraction * (1 << 30)) - beside

    def overdrawn(self, fraction: float) -> int:
        return 0

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        self.allocations += 1
        return torch.zeros(shape, dtype=dtype)

    def pool(self, nbytes: int) -> Tensor:
        # Committed on first write, as on the CPU: tests of how much a card has make pools of a gigabyte.
        return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)

    def staging(self, *shape: int, dtype: torch.dtype) -> Tensor:
        self.allocations += 1
        made = garbage(torch.empty(shape, dtype=dtype))
        self._staging.add(made.untyped_storage().data_ptr())
        return made

    def host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def enqueue(self, body: Body) -> None:
        self._work.append(body)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        if source.untyped_storage().data_ptr() in self._staging:
            self._used.append(source)

    def record(self) -> FakeEvent:
        event = FakeEvent(self)
        self._work.append(event)
        return event

    def graph_sizes(self, max_rows: int) -> tuple[int, ...]:
        return (
            tuple(size for size in self._sizes if size < max_rows)
            + tuple(size for size in self._sizes if size >= max_rows)[:1]
        )

    def graph_tokens(self, max_tokens: int) -> tuple[int, ...]:
        return tuple(size for size in self._token_sizes if size <= max_tokens)

    def graph_memory(self) -> tuple[int, int]:
        memory = (0, len(self._memories) + 1)
        self._memories[memory] = 0
        return memory

    def capture(self, body: Body, memory: tuple[int, int]) -> Body:
        """As torch does, it refuses memory whose graphs have all gone."""
        used = self._memories[memory]
        assert used >= 0, f"memory {memory} went with the last graph that was captured with it"
        body()
        self.captured += 1
        self._memories[memory] = used + 1

        def replay() -> None:
            self.replayed += 1
            body()

        weakref.finalize(replay, self._release, memory)
        return replay

    def _release(self, memory: tuple[int, int]) -> None:
        self._memories[memory] = self._memories[memory] - 1 or -1

    @property
    def graphs(self) -> int:
        """What is captured and still there."""
        return sum(max(0, used) for used in self._memories.values())

    def explain(self, error: BaseException) -> str:
        return f"the fake device: {error}"

    def run_until(self, event: FakeEvent) -> None:
        """Run the work before `event`, in its order."""
        with self._running:
            while not event.happened:
                work = self._work.popleft()
                if isinstance(work, FakeEvent):
                    work.happened = True
                    continue
                if self.fail_with is not None:
                    raise self.fail_with
                work()
                for used in self._used:
                    garbage(used)
                self._used.clear()


def garbage(tensor: Tensor) -> Tensor:
    """Fill with what no step may take for an input."""
    return tensor.fill_(float("nan") if tensor.is_floating_point() else _GARBAGE if tensor.itemsize > 1 else 0xA5)

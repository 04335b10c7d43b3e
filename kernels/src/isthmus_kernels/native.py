"""The compiled CPU library: found beside this file, loaded once, instruction set chosen at run time.

Entry points are plain C functions called through ctypes, which releases the GIL for the call. Each is compiled
once per instruction set with a suffix (`_base`, `_avx2`, `_avx512`), takes its arguments as an array of 8-byte
slots and returns 0 or an error code that its caller explains.
"""

import ctypes
import hashlib
import importlib.machinery
import logging
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

# torch must come first: the library asks OpenMP how many threads torch was told to use, and binds to whichever
# libgomp.so.1 is loaded. Its threads are its own (cpu/pool.cpp).
import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)
_LEVELS = ("base", "avx2", "avx512")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
DTYPES = frozenset(_DTYPES)
_POOL_DTYPES = _DTYPES | {torch.float8_e4m3fn: 2}
# What each library is compiled from, as in setup.py.
CPU_SOURCES = ("*/cpu/*.cpp", "cpu/*", "*/*.h")
CUDA_SOURCES = ("*/cuda/*", "cuda/*", "*/*.h")

Kept = tuple[Tensor | None, ...]
Explain = Callable[[int, Kept], Exception]


def dtype_code(dtype: torch.dtype, name: str) -> int:
    """Return the library's number for `dtype`; ValueError naming the argument when it has none."""
    code = _DTYPES.get(dtype)
    if code is None:
        raise ValueError(f"{name}: dtype {dtype} is not supported on CPU (float32 and bfloat16 are)")
    return code


def pool_code(dtype: torch.dtype) -> int:
    """Return the library's number for a KV pool of `dtype`; ValueError when it has none."""
    code = _POOL_DTYPES.get(dtype)
    if code is None:
        raise ValueError(f"kv: dtype {dtype} is not supported on CPU (float32, bfloat16 and float8_e4m3fn are)")
    return code


def scale_slots(scales: Tensor | None) -> tuple[int, int, int, int, int]:
    """Address and strides of a pool's scales (`kv_view.check_layer`), as entry points take them."""
    if scales is None:
        return 0, 0, 0, 0, 0
    block, part, token, head = scales.stride()
    return scales.data_ptr(), block, part, token, head


@cache
def library() -> ctypes.CDLL | None:
    """Load the compiled library; None (and one logged line) where it was not built or cannot run here."""
    folder = Path(__file__).parent
    path = find(folder, "_cpu")
    if path is None:
        _LOG.warning(
            "CPU kernels are not compiled: the slower PyTorch implementations are used, and answers may depend on what "
            "shares their batch"
        )
        return None
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        _LOG.warning("CPU kernels cannot be loaded (%s): the slower PyTorch implementations are used", error)
        return None
    lib.isthmus_sources.restype = ctypes.c_char_p
    sources = source_digest(folder, CPU_SOURCES)
    if sources is not None and lib.isthmus_sources().decode() != sources:
        _LOG.warning(
            "CPU kernels were compiled from other sources (%s; install again): "
            "the slower PyTorch implementations are used",
            path,
        )
        return None
    return lib


def find(folder: Path, name: str) -> Path | None:
    """Where the compiled library `name` is; None where it was not built."""
    paths = (folder / f"{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in paths if path.exists()), None)


def source_digest(folder: Path, patterns: tuple[str, ...]) -> str | None:
    """SHA-256 of the sources in a development checkout, as in setup.py; None where only the library is installed."""
    sources = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    if not sources:
        return None
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def level() -> str | None:
    """Name of the instruction set in use (base, avx2, avx512), or None without the library."""
    lib = library()
    return None if lib is None else _LEVELS[int(lib.isthmus_cpu_level())]


@cache
def multiplies_bf16() -> bool:
    """Whether the library and this CPU multiply pairs of bf16 in one instruction (AVX512-BF16)."""
    lib = library()
    return lib is not None and bool(lib.isthmus_cpu_bf16())


@cache
def prefers_pairs() -> bool:
    """Whether that instruction is also the fastest way to multiply bf16 here, rather than fp32 arithmetic."""
    lib = library()
    return lib is not None and bool(lib.isthmus_cpu_pairs())


def threads_present() -> int:
    """Threads that the library computes with at present: fewer than torch's number while others need their processors
    (cpu/pool.cpp). 0 before its first parallel loop."""
    lib = library()
    return 0 if lib is None else int(lib.isthmus_threads_present())


def available() -> bool:
    """Whether the compiled library can be used in this process."""
    return library() is not None


def out_of_memory(code: int, kept: Kept) -> Exception:
    """The explanation of an op whose only failure is its scratch."""
    del code, kept
    return MemoryError("no memory for the scratch of a CPU kernel")


class Entry:
    """One entry point of the library."""

    __slots__ = ("_call", "_pack", "address", "explain")

    def __init__(self, name: str, signature: str, explain: Explain, at_level: str | None) -> None:
        lib = library()
        assert lib is not None, "ask available() first"
        function = lib[f"isthmus_{name}_{at_level or level()}"]
        function.argtypes = [ctypes.c_char_p]
        function.restype = ctypes.c_int64
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        self.address = address
        self.explain = explain
        self._call: Callable[[bytes], int] = function
        self._pack = struct.Struct(signature).pack

    def __call__(self, kept: Kept, *values: float) -> int:
        """Call with `values`, or record that. `kept`: tensors behind the pointers. Raises what `explain` returns."""
        packed = self._pack(*values)
        program = _RECORDING.get()
        if program is not None:
            program.add(self, packed, kept)
            return 0
        code = self._call(packed)
        if code:
            raise self.explain(code, kept)
        return code

    def query(self) -> int:
        """Call an entry point that returns a number instead of a code."""
        return self._call(b"")


@cache
def entry(name: str, signature: str, explain: Explain = out_of_memory, at_level: str | None = None) -> Entry:
    """Bind entry point `name`. `signature` has a letter per slot: q integer or pointer, d floating point."""
    return Entry(name, signature, explain, at_level)


class Program:
    """A recorded sequence of CPU ops that runs again, on the same memory, as one call without Python.

    What the tensors hold may change between runs; their addresses and shapes may not. The program keeps every
    tensor that it uses alive. Runs on the calling thread; one run at a time.
    """

    __slots__ = ("_calls", "_packed", "_tables")

    def __init__(self) -> None:
        self._calls: list[tuple[Entry, Kept]] = []
        self._packed: list[bytes] = []
        self._tables: tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_void_p], object] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, called: Entry, packed: bytes, kept: Kept) -> None:
        """Append a call."""
        self._calls.append((called, kept))
        self._packed.append(packed)
        self._tables = None

    def run(self) -> None:
        """Run all calls in order; the first that fails raises what it would have raised alone."""
        lib = library()
        if lib is None or not self._calls:
            return
        if self._tables is None:
            self._tables = self._lay_out()
        functions, arguments, _ = self._tables
        failed = ctypes.c_int64()
        code = lib.isthmus_run(functions, arguments, ctypes.c_int64(len(self._calls)), ctypes.byref(failed))
        if code:
            called, kept = self._calls[failed.value]
            raise called.explain(code, kept)

    def _lay_out(self) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_void_p], object]:
        slots = ctypes.create_string_buffer(b"".join(self._packed))
        at = ctypes.addressof(slots)
        addresses = []
        for packed in self._packed:
            addresses.append(at)
            at += len(packed)
        table = ctypes.c_void_p * len(self._calls)
        return table(*(called.address for called, _ in self._calls)), table(*addresses), slots


_RECORDING: ContextVar[Program | None] = ContextVar("isthmus_recording", default=None)


@contextmanager
def record() -> Iterator[Program]:
    """Record every CPU op of the body into a `Program`, in place of running it: Python between two ops costs least
    while none of them has filled the caches, and no thread waits for it.

    PyTorch's own operations run, and are not recorded. Records nothing where the library is not compiled.
    """
    program = Program()
    token = _RECORDING.set(program)
    try:
        yield program
    finally:
        _RECORDING.reset(token)

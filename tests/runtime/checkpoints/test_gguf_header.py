"""Headers of GGUF files that claim what is not there: refused at once, by name, in bounded memory."""

from __future__ import annotations

import resource
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus_runtime.checkpoints.gguf_header import scan_header
from isthmus_runtime.commands.model import model_main
from isthmus_runtime.errors import WeightsError

U32, STRING, ARRAY = 4, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


def file(*fields: bytes, tensors: bytes = b"", count: int = 0, claimed: int | None = None, version: int = 3) -> bytes:
    number = len(fields) if claimed is None else claimed
    return b"GGUF" + struct.pack("<IQQ", version, count, number) + b"".join(fields) + tensors + bytes(64)


def tensor(name: str, *dims: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


NESTED = array(ARRAY, 1, array(ARRAY, 1, array(U32, 1, bytes(4))))
HOSTILE = {
    "array of 2^60": (file(field("a", ARRAY, array(U32, 1 << 60))), "elements of a is 1152921504606846976"),
    "texts of 2^60": (file(field("a", ARRAY, array(STRING, 1 << 60))), "the number of elements of a"),
    "array of 2^22": (file(field("a", ARRAY, array(U32, 1 << 22))), "16777216 bytes, but 64 are left"),
    "texts of 2^22": (file(field("a", ARRAY, array(STRING, 1 << 22))), "a has 4194304 texts; at most 1048576"),
    "texts of two": (
        file(*(field(key, ARRAY, array(STRING, 600_000, bytes(4_800_000))) for key in "ab")),
        "b has 600000 texts; at most 1048576",
    ),
    "texts of 2^20": (file(field("a", ARRAY, array(STRING, 1 << 20))), "1048576 texts, but 64 bytes are left"),
    "nested": (file(field("a", ARRAY, NESTED)), "array of arrays"),
    "a long text": (file(field("a", STRING, struct.pack("<Q", 1 << 60))), "the length of a is 1152921504606846976"),
    "a long key": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "the length of a metadata key"),
    "many fields": (file(claimed=1 << 60), "the number of metadata fields"),
    "many tensors": (file(count=1 << 60), "the number of tensors"),
    "a large tensor": (file(tensors=tensor("t", 1 << 40, 1 << 20), count=1), "tensor t ends"),
    "a tensor elsewhere": (file(tensors=tensor("t", 1, offset=1 << 62), count=1), "tensor t ends"),
    "many dimensions": (file(tensors=tensor("t", *[1] * 64), count=1), "64 dimensions"),
    "an unknown type": (file(tensors=tensor("t", 1, kind=999), count=1), "unknown type 999"),
    "an unknown field": (file(field("a", 77, b"")), "unknown type 77"),
    "twice": (file(field("a", U32, bytes(4)), field("a", U32, bytes(4))), "'a' is there twice"),
    "an alignment": (file(field("general.alignment", U32, struct.pack("<I", 3))), "general.alignment 3"),
    "another byte order": (file(version=3 << 24), "little-endian"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_by_name(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, said = HOSTILE[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert model_main(["import", str(path), "--out", str(tmp_path / "out")]) == 1
    stderr = capsys.readouterr().err
    assert said in stderr and "hashing" not in stderr
    assert not (tmp_path / "out").exists()


def test_a_hostile_header_costs_neither_time_nor_memory(tmp_path: Path) -> None:
    """In a process with 512 MiB of address space more than an import needs to start, and a deadline."""
    for number, (content, _) in enumerate(HOSTILE.values()):
        (tmp_path / f"{number}.gguf").write_bytes(content)
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from isthmus_runtime.checkpoints.gguf_header import scan_header\n"
        "from isthmus_runtime.errors import WeightsError\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), resource.RLIM_INFINITY))\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        scan_header(Path(path))\n"
        "    except WeightsError:\n"
        "        continue\n"
        "    sys.exit(path)\n"
    )
    files = [str(path) for path in tmp_path.iterdir()]
    subprocess.run([sys.executable, "-c", script, *files], check=True, timeout=60)


def test_the_header_is_judged_before_the_file_is_hashed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "a-family-of-tomorrow")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert model_main(["import", str(tmp_path / "x.gguf"), "--out", str(tmp_path / "out")]) == 1
    stderr = capsys.readouterr().err
    assert "'a-family-of-tomorrow' is not supported" in stderr and "hashing" not in stderr


def good(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_array("scores", [0.5, 1.5, 2.5])
    writer.add_tensor("t", np.arange(64, dtype=np.float32).reshape(8, 8))
    writer.add_tensor("u", np.arange(32, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_good_header_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    path = good(tmp_path / "x.gguf")
    scan, reader = scan_header(path), gguf.GGUFReader(path)
    assert set(scan.tensors) == {tensor.name for tensor in reader.tensors} == {"t", "u"}
    assert scan.metadata["general.architecture"] == "llama" and scan.metadata["llama.context_length"] == 128
    assert scan.metadata["tokenizer.ggml.tokens"] is None
    read = scan_header(path, arrays=True)
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert read.metadata == theirs and read.tensors == scan.tensors
    assert read.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ü"] and read.metadata["scores"] == [0.5, 1.5, 2.5]
    for tensor in reader.tensors:
        found = read.tensors[tensor.name].read(path)
        assert found.dtype == tensor.data.dtype
        np.testing.assert_array_equal(found, tensor.data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=9), st.integers(0, 10_000))
def test_any_damage_is_refused_or_read(tmp_path: Path, at: int, patch: bytes, keep: int) -> None:
    content = bytearray(good(tmp_path / "good.gguf").read_bytes())
    at %= len(content)
    content[at : at + len(patch)] = patch
    path = tmp_path / "bad.gguf"
    path.write_bytes(content[: max(1, keep)] if keep < 300 else content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        for one in scan_header(path, arrays=True).tensors.values():
            assert one.read(path).nbytes == one.nbytes
    except WeightsError as error:
        assert str(path) in str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_hundreds_of_thousands_of_texts_take_a_small_multiple_of_the_file(tmp_path: Path) -> None:
    """The library's reader takes 2.8 KB for each, 1.1 GB of these 3 MB."""
    path, count = tmp_path / "x.gguf", 400_000
    texts = field("tokenizer.ggml.tokens", ARRAY, array(STRING, count, bytes(8 * count)))
    path.write_bytes(file(field("general.architecture", STRING, text("llama")), texts))
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from isthmus_runtime.checkpoints.gguf import import_gguf\n"
        "from isthmus_runtime.errors import WeightsError\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), resource.RLIM_INFINITY))\n"
        "try:\n"
        "    import_gguf(Path(sys.argv[1]), Path(sys.argv[2]), print)\n"
        "except WeightsError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", script, str(path), str(tmp_path / "out")]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert "head_count is missing" in done.stdout

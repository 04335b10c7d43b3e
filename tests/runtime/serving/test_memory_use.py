"""What is read of control groups and processes."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from isthmus_runtime.serving.memory_use import MemoryUse, find_limit

MIB = 1 << 20
V2 = {
    "memory.max": f"{1024 * MIB}\n",
    "memory.current": f"{900 * MIB}\n",
    "memory.stat": f"anon {300 * MIB}\nfile {500 * MIB}\nshmem {40 * MIB}\nslab_reclaimable {10 * MIB}\nsock 5\n",
}
V1 = {
    "memory.limit_in_bytes": f"{1024 * MIB}\n",
    "memory.usage_in_bytes": f"{900 * MIB}\n",
    "memory.stat": f"cache 1\nrss 1\ntotal_cache {500 * MIB}\ntotal_rss {300 * MIB}\ntotal_shmem {40 * MIB}\n",
}


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def machine(root: Path, own: str, mebibytes: int = 8192) -> tuple[Path, Path]:
    """Folders as of /sys/fs/cgroup and /proc."""
    write(root / "proc", {"meminfo": f"MemTotal: {mebibytes * 1024} kB\nMemFree: 1 kB\n"})
    write(root / "proc" / "self", {"cgroup": own})
    (root / "cgroup").mkdir()
    return root / "cgroup", root / "proc"


@pytest.mark.parametrize(
    ("own", "folder", "files", "used"),
    [
        ("0::/\n", "", V2, 900 - 500 + 40 - 10),
        ("0::/kubepods/pod1/c\n", "", V2, 900 - 500 + 40 - 10),  # its own group is at the mount, in its namespace
        ("0::/user.slice/run.scope\n", "user.slice/run.scope", V2, 900 - 500 + 40 - 10),
        ("5:cpu:/x\n4:memory:/docker/c\n0::/\n", "memory", V1, 900 - 500 + 40),
        ("4:cpu,memory:/docker/c\n", "memory/docker/c", V1, 900 - 500 + 40),
    ],
)
def test_of_a_control_group_counts_what_the_kernel_cannot_take_back(tmp_path, own, folder, files, used) -> None:
    groups, processes = machine(tmp_path, own)
    write(groups / folder, files)
    found = find_limit(None, groups=groups, processes=processes, log=pytest.fail)
    assert found is not None and found.limit == 1024 * MIB
    assert found.read().used == used * MIB


def test_the_tightest_of_the_groups_around_a_process_holds_it(tmp_path) -> None:
    groups, processes = machine(tmp_path, "0::/pod/c\n")
    write(groups / "pod/c", {**V2, "memory.max": "max\n"})
    write(groups / "pod", {**V2, "memory.max": f"{512 * MIB}\n"})
    write(groups, V2)
    found = find_limit(None, groups=groups, processes=processes, log=pytest.fail)
    assert found is not None and found.limit == 512 * MIB


@pytest.mark.parametrize("limit", ["max", str(9223372036854771712), str(8192 * MIB)])
def test_without_a_limit_nothing_is_watched_and_that_is_said(tmp_path, limit) -> None:
    groups, processes = machine(tmp_path, "0::/\n")
    write(groups, {**V2, "memory.max": limit + "\n"})
    said: list[str] = []
    assert find_limit(None, groups=groups, processes=processes, log=said.append) is None
    assert len(said) == 1 and "--memory-limit" in said[0]


def test_a_limit_that_was_given_is_for_this_process_and_those_that_work_for_it(tmp_path) -> None:
    found = find_limit(100 * MIB, log=pytest.fail)
    assert found is not None
    before = found.read()
    assert before.mine == before.used > MIB and before.limit == 100 * MIB
    # A mapping of its own: what the heap has free already would be no more.
    with mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(b"x" * (16 * MIB))
        assert found.read().mine - before.mine > 12 * MIB
    found.add(os.getppid())
    assert found.read().mine > 0
    with pytest.raises(OSError, match=r"statm|No such"):
        MemoryUse(1, None, pid=2**22 + 1)

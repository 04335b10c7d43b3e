"""What an earlier run has left is removed by several at once: the suites run beside each other."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from testcluster.cluster import unless_gone


def test_several_remove_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for one in range(40):
        (folder / str(one)).mkdir(parents=True)
        for number in range(20):
            (folder / str(one) / str(number)).touch()
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(partial(shutil.rmtree, folder, onerror=unless_gone)) for _ in range(8)]:
            done.result()
    assert not folder.exists()

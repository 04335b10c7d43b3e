"""Links in a model folder: none that leads out of it is followed."""

import shutil
from pathlib import Path

import pytest

from isthmus_runtime.errors import ConfigError
from isthmus_runtime.model_files import check_links
from isthmus_runtime.models.registry import read_model_spec
from isthmus_runtime.openai.tokenizer import Tokenizer


@pytest.mark.parametrize("read", [check_links, read_model_spec, Tokenizer.load])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, read: object) -> None:
    """A template that was a link to the file of tenants gave their keys to any client."""
    secret = tmp_path / "keys"
    secret.write_text("{}")
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "chat_template.jinja").symlink_to(secret)
    assert callable(read)
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: is a link out of its folder"):
        read(folder)


def test_a_link_in_a_folder_below_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m" / "1_Pooling").mkdir(parents=True)
    (tmp_path / "m" / "1_Pooling" / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match="is a link out of its folder"):
        check_links(tmp_path / "m")


def test_links_that_stay_inside_are_followed(tmp_path: Path) -> None:
    """As mounts of ConfigMaps have them, and caches of Hugging Face; and the folder itself may be one."""
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "a").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/a")
    (snapshot / "same.json").symlink_to("config.json")
    check_links(snapshot)
    (tmp_path / "link").symlink_to(snapshot)
    check_links(tmp_path / "link")
    check_links(tmp_path / "nothing")
    shutil.rmtree(blobs)
    blobs.symlink_to("/etc")
    (snapshot / "other.json").symlink_to("../../blobs/hostname")
    with pytest.raises(ConfigError, match=r"other\.json"):
        check_links(snapshot)

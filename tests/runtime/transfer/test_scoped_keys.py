"""Keys of one attempt are removed once, by whoever has to."""

from __future__ import annotations

from isthmus_runtime.transfer.scoped_keys import ScopedKeys, is_scoped


def test_decodes_keys_go_with_the_attempt_and_prefills_wait_for_a_sweep() -> None:
    keys = ScopedKeys()
    keys.expect("received", ["b", "a"])
    assert keys.write("sent", ["k"]) and not keys.write("sent", ["record:sent"])
    assert keys.end_with("received")
    assert not keys.end_with("sent") and not keys.end_with("unknown")
    assert keys.pop("received") == ["a", "b"]
    assert keys.pop("sent") == ["k", "record:sent"]


def test_what_was_handed_out_for_removal_is_nobodys_any_more() -> None:
    keys = ScopedKeys()
    assert keys.write("a", ["k"])
    assert keys.pop("a") == ["k"] and keys.pop("a") == []
    assert keys.write("a", ["k"]), "it is swept again"
    keys.pop("a")
    keys.expect("a", ["k"])
    assert keys.end_with("a")


def test_the_incomplete_block_and_the_record_belong_to_the_attempt() -> None:
    assert is_scoped("kv:L:0:partial:attempt") and is_scoped("record:attempt")
    assert not is_scoped("kv:L:0:abcdef")

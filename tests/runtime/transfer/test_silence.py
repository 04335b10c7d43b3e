"""A peer that kept silent is tried by one at a time, and by all once it has answered."""

from __future__ import annotations

from isthmus_runtime.transfer.silence import Silence


def test_one_tries_a_silent_peer_in_each_pause_and_all_once_it_answers() -> None:
    now = [0.0]
    silence = Silence(lambda: now[0], 1.0, try_s=0.5)
    assert silence.lets_try("a") and silence.lets_try("a"), "nothing is known against it"
    silence.note("a")
    assert silence.holds("a") and not silence.lets_try("a")
    now[0] = 1.0
    assert silence.lets_try("a")
    now[0] = 2.4
    assert not silence.lets_try("a"), "another tries it already"
    now[0] = 2.5
    assert silence.lets_try("a"), "whoever tried it never came back"
    silence.note("a")
    now[0] = 3.4
    assert not silence.lets_try("a"), "it kept silent again"
    now[0] = 3.5
    assert silence.lets_try("a")
    silence.over("a")
    assert silence.lets_try("a") and silence.lets_try("a") and not silence.holds("a")
    silence.over("never met")

"""Of all that hold too much, the largest of the client that has most gives way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.sharing.giving_way import Held, who_gives_way


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 100)), max_size=40),
    st.integers(-100, 1000),
    st.integers(1, 9),
)
def test_who_gives_way_is_the_largest_of_the_client_with_most_and_so_on(sizes, excess, part) -> None:
    held = [Held(client, size, number) for number, (client, size) in enumerate(sizes)]
    chosen, left, freed = who_gives_way(held, excess, part), list(held), 0
    assert bool(chosen) == (bool(held) and excess > 0) and len(chosen) <= max(1, len(held) // part)
    for one in chosen:
        assert freed < excess
        of = {client: sum(h.size for h in left if h.client == client) for client in "abc"}
        assert of[one.client] == max(of[h.client] for h in left)
        assert one.size == max(h.size for h in left if h.client == one.client)
        left.remove(one)
        freed += one.size
    assert freed >= excess or len(chosen) == max(1, len(held) // part) or not chosen

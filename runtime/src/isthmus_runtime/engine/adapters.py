"""Which low-rank adapter (LoRA) is in which slot of the device, and who may start with one. Pure.

A slot is given to another adapter only when no running request computes with it: the least recently started first.
Where every slot is in use, the first request that waits for one claims the slot that was least recently started with:
nobody starts with that adapter any more, so the slot comes free as soon as its requests end, and no stream of requests
for other adapters can keep a request waiting beyond that. An adapter that waits has one claim, however many requests
wait for it. Requests without an adapter, and with those that nobody claims, pass by.
"""

from __future__ import annotations

from collections import Counter

from ..errors import UnknownModel
from ..interfaces.steps import AdapterSlot
from ..request import AdapterName


class AdapterSlots:
    """The adapters that are known to an engine, by digest, and `most` slots."""

    def __init__(self, most: int) -> None:
        self._free = list(range(most, 0, -1))
        self._names: dict[str, str] = {}
        self._slots: dict[str, int] = {}
        """Least recently started first."""
        self._running: Counter[str] = Counter()
        self._live: Counter[str] = Counter()
        self._retired: dict[str, int] = {}
        """Digest: newest step that may name it."""
        self._claims: dict[str, str] = {}
        """Who waits, and whose slot it is to have."""
        self._loads: dict[int, AdapterSlot] = {}
        """By slot: what the executor has not been told yet."""

    def add(self, adapter: AdapterName) -> None:
        """From now on requests may ask for it."""
        self._names[adapter.digest] = adapter.name
        self._retired.pop(adapter.digest, None)

    def retire(self, digest: str, step: int) -> None:
        """No new request may ask for it; those that are live go on. `step`: the newest that was planned."""
        if digest in self._names:
            self._retired[digest] = step

    def unused(self, oldest: int | None) -> list[str]:
        """Retired adapters that no request and no step in flight needs: they are forgotten now. `oldest`: step in
        flight; None: there is none."""
        found = [
            digest
            for digest, step in self._retired.items()
            if not self._live[digest] and (oldest is None or oldest > step)
        ]
        for digest in found:
            del self._retired[digest], self._names[digest]
            slot = self._slots.pop(digest, None)
            if slot is not None:
                self._loads.pop(slot, None)
                self._free.append(slot)
        return found

    def arrived(self, adapter: AdapterName) -> None:
        """A request asks for it. Raises UnknownModel where it is not known."""
        if adapter.digest not in self._names or adapter.digest in self._retired:
            names = self._names.items()
            others = [digest for digest, name in names if name == adapter.name and digest not in self._retired]
            found = f"has another one of this name, {others[0]}" if others else "does not have it"
            raise UnknownModel(
                f"model: adapter {adapter.name!r} of content {adapter.digest} was asked for, and this engine {found}; "
                "load the same files under this name on every engine of the service",
                param="model",
            )
        self._live[adapter.digest] += 1

    def ended(self, digest: str, step: int) -> None:
        """A request that asked for it is no longer live; `step` is the newest that may name it."""
        self._live[digest] -= 1
        if digest in self._retired:
            self._retired[digest] = step

    def begin(self) -> None:
        """A step is planned: nothing is claimed yet."""
        self._claims.clear()

    def may_start(self, digest: str) -> bool:
        """Whether a request may start with it now. Asked in the order of rank; where not, a slot is claimed for it."""
        if digest in self._slots:
            return digest not in self._claims.values()
        if self._free:
            return True
        victim = self._claims.get(digest) or self._victim()
        if victim is None:
            return False
        self._claims[digest] = victim
        return not self._running[victim]

    def start(self, digest: str) -> int:
        """A request takes a row with it, which `may_start` has allowed: its slot."""
        slot = self._slots.pop(digest, None)
        if slot is None:
            if self._free:
                slot = self._free.pop()
            else:
                victim = self._claims.pop(digest)
                assert not self._running[victim], f"{victim} gives its slot to {digest} in the midst of its requests"
                slot = self._slots.pop(victim)
            self._loads[slot] = AdapterSlot(slot, self._names[digest], digest)
        self._slots[digest] = slot
        self._running[digest] += 1
        return slot

    def stopped(self, digest: str) -> None:
        """A request with it has left its row."""
        self._running[digest] -= 1

    def take_loads(self) -> tuple[AdapterSlot, ...]:
        """What the step that is submitted now has to put into slots."""
        if not self._loads:
            return ()
        loads, self._loads = tuple(self._loads.values()), {}
        return loads

    def give_back(self, loads: tuple[AdapterSlot, ...]) -> None:
        """The step did not run: a later one has to do it."""
        for load in loads:
            if self._slots.get(load.digest) == load.slot:
                self._loads.setdefault(load.slot, load)

    def in_slots(self) -> tuple[str, ...]:
        """Digests of those on the device, least recently started first."""
        return tuple(self._slots)

    def check(self, running: Counter[str], live: Counter[str]) -> None:
        """Assert that the counts are those of the requests. Raises AssertionError."""
        assert +self._running == running, f"adapters in rows: {self._running}, counted {running}"
        assert +self._live == live, f"adapters of requests: {self._live}, counted {live}"
        assert all(digest in self._slots for digest in running), "a row computes with an adapter that has no slot"
        slots = [*self._free, *self._slots.values()]
        assert len(set(slots)) == len(slots), f"a slot is in use twice: {slots}"

    def _victim(self) -> str | None:
        """Who gives way: the least recently started of those that nobody has claimed, if possible one that no row
        computes with."""
        claimed = self._claims.values()
        left = [digest for digest in self._slots if digest not in claimed]
        return next((digest for digest in left if not self._running[digest]), left[0] if left else None)

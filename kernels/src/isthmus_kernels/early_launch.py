"""Kernels that may begin while the one before them still runs (programmatic dependent launch, capability 9.0), on
devices that are switched to it: those whose ranks sum in memory of each other (docs/adr/0031, 0054).

A kernel that is launched so waits (`griddepcontrol.wait`) in every program, for the end of the kernel before it and of
all before that one. Until then it reads weights alone, which no kernel of a step writes, and writes nothing: so it does
not matter what runs before or after it. As it begins it lets the next one begin (`launch_dependents`), which takes
places that are free once all programs of this one have theirs, so on one stream nobody takes the places of who is
waited for. Where streams of a card wait for each other, as ranks of tests do, it must be off: kernels that wait would
take all places. Kernels that are launched in order take no notice of any of it.
"""

import torch

_ON: set[torch.device] = set()


def switch(device: torch.device, on: bool) -> None:
    """Say whether kernels on `device` may begin early; they do not until this is called. Graphs that were captured keep
    what they were captured with."""
    if on:
        _ON.add(device)
    else:
        _ON.discard(device)


def allowed(device: torch.device) -> bool:
    """Whether they may."""
    return device in _ON

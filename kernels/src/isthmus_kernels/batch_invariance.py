"""Whether a row's result may depend on its batch. On CPUs it never does (docs/adr/0025). On GPUs kernels are chosen,
and sums are ordered, by how much there is to do, unless a device is switched to kernels that treat every row alike:
each number of a row is summed in one order, whatever shares its batch and however its prompt was cut (docs/adr/0040).

What differs when it is on: products and experts go through tiles whose loop over columns is one and the same for any
number of rows; all attention goes through the tiles of prefill, which read a context from its first key to its last;
filters of sampling cut the vocabulary into a fixed number of parts.
"""

import torch

_ON: set[torch.device] = set()


def switch(device: torch.device, on: bool) -> None:
    """Say whether results on `device` must not depend on the batch; they may until this is called. Graphs that were
    captured keep what they were captured with."""
    if on:
        _ON.add(device)
    else:
        _ON.discard(device)


def required(device: torch.device) -> bool:
    """Whether it is on for `device`."""
    return device in _ON

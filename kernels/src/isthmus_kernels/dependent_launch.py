"""Programmatic dependent launch (Hopper and later): a kernel's programs take their places, and load what no other
kernel writes, while the kernel before it on the stream is still finishing (CUDA Programming Guide, "Programmatic
Dependent Launch and Synchronization"; PTX `griddepcontrol`).

Triton's names: `gdc_launch_dependents` lets the next kernel's programs start once every program of this one has called
it (or ended); `gdc_wait` waits until the kernel before has ended and its writes are seen. Three rules keep the order
that a stream promises, and tests/kernels/test_dependent_launch.py holds every compiled kernel to them:

1. A kernel launched with `options` waits in every program, before any branch, return, store or atomic: also one that
   reads nothing of its predecessor. A wait is for one kernel alone; that the predecessor had ended says that *its*
   predecessors had only because it waited for them.
2. What is read before the wait is written by no kernel: weights, from when the model was loaded.
3. `gdc_launch_dependents` comes first. By rule 2 it lets nothing run too early, and a program that waits takes no place
   that an earlier kernel still needs, as the earlier one's programs have all started.

A kernel launched without `options`, of a library or our own, starts after all before it has ended, and lets the next
one start when its own programs have: it needs to know nothing of this.
"""

from functools import cache

import torch

_ON: set[torch.device] = set()


@cache
def supported(device: torch.device) -> bool:
    """Whether `device` has `griddepcontrol`: compute capability 9.0 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def switch(device: torch.device, on: bool) -> None:
    """Say whether kernels on `device` are launched this way; they are not until this is called (docs/adr/0031). Graphs
    that were captured keep what they were captured with."""
    if on:
        _ON.add(device)
    else:
        _ON.discard(device)


def options(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch: the kernel's constexpr `PDL`, and Triton's own option."""
    on = device in _ON and supported(device)
    return {"PDL": on, "launch_pdl": on}

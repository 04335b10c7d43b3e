"""Deterministic simulation: proof of the pure core under faults, and capacity planning.

Called by ``commands.simulate`` and tests. ``proof`` runs the real scheduler, pool, engine loop, transfer agent and
router policy in a seeded world with a virtual clock; ``planner`` is a coarse model for clusters nobody has at hand.
No torch, threads, sockets or real time; nothing here is used by a serving process.
"""

"""Moves KV blocks between pods: directly (Mooncake TransferEngine) or through the Mooncake store.

Implements ``interfaces.transport.KvTransfer``; built by ``commands``. ``agent`` joins ``leg``, the pure state machine
of a transfer, to a back end: ``direct`` or ``store``, or ``memory``, the fault-injecting in-process fake. Transports
are explicit and never fall back in silence.
No scheduling decisions, no HTTP API, no creation of KV tensors here.
"""

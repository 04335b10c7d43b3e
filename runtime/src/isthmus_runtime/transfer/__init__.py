"""Moves KV blocks between pods: directly (Mooncake TransferEngine) or through the Mooncake store.

Implements ``interfaces.transport.KvTransfer``; built by ``commands``. ``leg`` is the pure state machine of a transfer,
``memory`` the fault-injecting in-process fake. Transports are explicit and never fall back in silence.
No scheduling decisions, no HTTP API, no creation of KV tensors here.
"""

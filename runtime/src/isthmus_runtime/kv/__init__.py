"""KV cache bookkeeping: the arithmetic, the block pool and the keys.

Callers: start-up (how many blocks, which length fits), the scheduler (admission, allocation, prefix hits), the
transfer legs (leases, keys), the simulator and the `kv-plan` command. `groups` holds layer specs and per-group
demand, `plan` turns memory into a number of blocks, `pool` owns block ids (`free_list`: the order in which they are
reused; `prefix`: what is found by its hash), `keys` names block contents.

Everything here is pure: no torch, clock, randomness, sockets or files (only `plan.kv_plan_main`, the command,
reads its file). Tensors are created in `executor.kv_cache`; moving bytes belongs to `transfer`.
"""

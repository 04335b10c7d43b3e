"""What the executor runs on. `base` is the protocol, `cpu` and `cuda` keep it; nothing else knows a kind of device."""

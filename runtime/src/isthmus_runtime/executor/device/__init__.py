"""What the executor runs on. `base` is the protocol, `cpu` and `cuda` keep it, `select` picks one; nothing else knows a
kind of device.
"""

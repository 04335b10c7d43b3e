"""Gated activation silu(gate) * up on a fused gate/up projection."""

"""Gated activations, silu(gate) * up and gelu_tanh(gate) * up, on a fused gate/up projection."""

"""Rotary embedding and KV write of latent attention."""

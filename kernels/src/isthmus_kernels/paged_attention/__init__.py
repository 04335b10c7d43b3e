"""Causal attention of a mixed prefill and decode batch over a paged KV pool."""

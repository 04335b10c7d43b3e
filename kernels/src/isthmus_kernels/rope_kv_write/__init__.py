"""Rotary embedding of q and k, and the write of k and v to the paged pool."""

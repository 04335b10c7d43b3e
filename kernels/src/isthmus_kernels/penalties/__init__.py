"""Penalties on tokens that came before."""

"""Mixture of experts: the choice of experts, and their gated MLPs on the tokens that chose them."""

"""Sums over the GPUs of one host, alone or with the residual addition and RMSNorm that follow them."""

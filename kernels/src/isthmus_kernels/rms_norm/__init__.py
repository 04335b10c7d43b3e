"""Root-mean-square norm, alone or fused with the residual addition."""

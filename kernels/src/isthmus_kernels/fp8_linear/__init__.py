"""Matrix product with a weight of 8-bit floats (E4M3) and one scale a row."""

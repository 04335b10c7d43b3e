"""Matrix product with a weight that was packed once at load time."""

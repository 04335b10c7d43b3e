"""Low-rank adapters of rows of one batch."""

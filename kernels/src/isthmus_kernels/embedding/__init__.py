"""Rows of an embedding table, scaled."""

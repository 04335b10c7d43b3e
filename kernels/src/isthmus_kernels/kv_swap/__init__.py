"""Copies of KV blocks between a pool and a host buffer."""

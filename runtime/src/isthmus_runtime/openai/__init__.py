"""The OpenAI-compatible HTTP API over any Backend: schema, chat template, streaming, errors.

Used by the router and by the unified role; built by ``commands``. Validates, tokenises once, streams chunks
unbuffered, and ends every request exactly once. No torch, and no knowledge of pods, engines or transfers.
"""

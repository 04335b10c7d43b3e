"""HTTP for every role: one FastAPI application on uvicorn, with limits on what arrives and a graceful shutdown.

Knows nothing of prompts, engines or routing.
"""

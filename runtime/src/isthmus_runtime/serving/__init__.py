"""HTTP for every role: one FastAPI application on uvicorn, with limits on what comes in and a graceful end.

Knows nothing of prompts, engines or routing.
"""

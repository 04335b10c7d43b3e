"""Structured output: grammars of what a request may generate. `openai` checks them, an engine makes masks of them."""

"""Masks of structured output over logits."""

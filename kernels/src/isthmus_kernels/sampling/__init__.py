"""Token choice from logits: greedy, filtered random, log-probabilities."""

"""Operators of packed language models that torch does not have: log-probs, attention, norms, RoPE."""

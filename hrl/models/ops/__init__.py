"""Operators that a packed language model needs and that torch does not have: one log-prob, one attention."""

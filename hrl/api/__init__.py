"""Training from Python: trainers, what they are given, and what a run leaves."""

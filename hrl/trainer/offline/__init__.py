"""Trainers that learn from a data set instead of samples: DPO, SFT, reward models."""

"""Configuration of the trainers that learn from a data set instead of samples: DPO, SFT, reward models."""

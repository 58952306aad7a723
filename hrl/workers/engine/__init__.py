"""The training engine: packed micro-batches through a sharded transformers model, and its state."""

"""Pure planning from lengths: balance over ranks, packing under a token budget. No torch, no communication."""

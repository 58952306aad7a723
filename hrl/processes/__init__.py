"""Child processes: how they start, what they see, and that they end with whoever started them."""

"""Child processes: how they start, their environment, and how they end together with their parent."""

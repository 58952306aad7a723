"""Data sets of answers that are already there: pairs of which one was preferred, and demonstrations."""

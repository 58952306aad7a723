"""Data sets with given answers: preference pairs and demonstrations."""

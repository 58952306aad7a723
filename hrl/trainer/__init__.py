"""Trainers: the algorithm in one process, and what it needs around it."""

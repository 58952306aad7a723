"""Compatibility with verl: its function names and signatures over hrl's code, and its names of keys."""

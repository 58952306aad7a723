"""Doors for people who arrive from verl: its names and signatures over the code of hrl."""

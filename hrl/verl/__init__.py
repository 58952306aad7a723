"""Compatibility with verl: its function names and signatures over hrl's code. Its names of keys are in `hrl.config`."""

"""The checks of `hrl check` and of every run before anything starts."""

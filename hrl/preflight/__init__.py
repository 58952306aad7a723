"""What `hrl check` and every run look at before anything starts."""

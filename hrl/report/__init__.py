"""What a run shows and leaves: console, metrics, trackers, samples, pictures, the report."""

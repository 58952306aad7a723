"""The output of a run: console, metrics, trackers, samples, pictures and the report."""

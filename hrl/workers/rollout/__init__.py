"""Sampling: engines behind one request-level interface, and the host that runs one for a worker."""

"""A launch line, run small on this machine: what of it works, before a cluster is asked."""

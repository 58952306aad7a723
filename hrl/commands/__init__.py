"""What each command of the shell does: one file per command, listed in `table.py`."""

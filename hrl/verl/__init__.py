"""What people who arrive from verl bring: its names and signatures over the code of hrl, and its names of keys."""

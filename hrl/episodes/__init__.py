"""How an episode is played, and how its tokens become rows."""

"""How programs that speak OpenAI's protocol reach an engine, and what becomes of their calls."""

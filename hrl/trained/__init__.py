"""What a finished model is worth, and how it is handed on."""

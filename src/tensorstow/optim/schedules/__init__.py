"""When updates run: at once, beside forward, beside backward."""

"""Where states live and how they move: layout, memory formula, chunks, the native pipeline."""

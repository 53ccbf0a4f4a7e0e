"""Where optimizer states are, and how they move: layout, chunks, the native pipeline."""

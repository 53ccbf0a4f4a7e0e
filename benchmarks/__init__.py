"""What `make bench` measures: one module per subject, `run.py` runs them."""

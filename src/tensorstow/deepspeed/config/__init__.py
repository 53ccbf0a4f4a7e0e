"""What DeepSpeed's JSON says: read, checked, and what becomes of each key."""

"""DeepSpeed's JSON configuration: read, checked, and explained key by key."""

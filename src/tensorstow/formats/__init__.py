"""State formats: the streams of each, their roundings, and the update rules in plain torch."""

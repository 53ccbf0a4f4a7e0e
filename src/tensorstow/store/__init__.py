"""Durable storage: extents in data files, generations in an SQLite manifest, one lock."""

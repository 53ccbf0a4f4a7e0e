"""What is kept on disk: extents in data files, generations in a manifest, and who holds it."""

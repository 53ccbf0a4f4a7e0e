"""Bytes between memory and files: aligned memory, files, and the engine that serves here."""

"""Each wait in our code is taken away in turn, and a test must fail.

A wait is whatever orders work of a device: events and who waits for them, streams that memory is
recorded on, pinned memory and copies that return at once. ``table`` has a mutation for each, and
the test that fails with it; tests/properties/test_mutations.py keeps the table complete, and ``make
mutations`` runs it.
"""

"""The command `tensorstow`."""

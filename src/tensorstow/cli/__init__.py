"""The command `tensorstow`: a printer of the layers below."""

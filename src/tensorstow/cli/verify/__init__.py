"""`tensorstow verify`: states in RAM and on disk give the same bits, on this machine.

``subject``: the model. ``rows``: the runs. ``training``: the loop, also as a program that is
killed, and the first difference. ``run``: the command.
"""

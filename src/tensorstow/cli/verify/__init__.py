"""`tensorstow verify`: states in RAM and on disk give the same bits, on this machine.

``subject``: the model. ``rows``: the runs. ``training``: the loop. ``killed``: a run in a separate
process, which is killed. ``comparison``: the first difference. ``run``: the command.
"""

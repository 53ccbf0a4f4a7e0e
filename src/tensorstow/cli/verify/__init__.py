"""`tensorstow verify`: states in RAM and on disk give the same bits, on this machine.

``subject``: the model. ``rows``: what is run. ``training``: the loop. ``killed``: a run in a
process of its own, which is killed. ``comparison``: what differed first. ``run``: the command.
"""

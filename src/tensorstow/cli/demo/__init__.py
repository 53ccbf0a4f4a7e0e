"""`tensorstow demo`: one small training run per row, then a table, pictures and an event log.

Read in this order: ``rows`` (what is run), ``training`` (the loop), ``child`` (one row in a process
of its own), ``result`` (what it hands back), ``distance`` (a step beside torch's), ``process`` and
``turns`` (all rows, in turns), ``durable`` and ``crash`` (a run that is killed), ``machine`` (what
else ran), ``verdict``, ``table``, ``events``, ``timeline``, ``curve``, ``page`` (what is made of
it), ``run`` (the command).
"""

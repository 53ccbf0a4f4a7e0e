"""`tensorstow demo`: one small training run per row, then a table, pictures and an event log.

Read in this order: ``rows`` (what is run), ``training`` (the loop), ``child`` (one row in a process
of its own), ``result`` (what it hands back), ``verdict``, ``table``, ``events``, ``timeline``,
``curve``, ``page`` (what is made of it), ``run`` (all of them in turn).
"""

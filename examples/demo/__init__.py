"""Trains GPT-2 under each configuration; compares time, memory and bits: `make demo`.

``configurations``: what is run. ``training``: the loop. ``worker``: one configuration in its own
process. ``result``: what it returns. ``ulp_difference``: one step compared with torch's.
``round_robin``: all workers, in turns. ``durable``, ``crash``: a killed run,
resumed. ``cpu_load``: what else used the cores. ``parity``, ``table``, ``events``, ``timeline``,
``memory_plot``, ``plots``, ``page``: the output. ``run``: all of it.
``__main__``: the command line.
"""

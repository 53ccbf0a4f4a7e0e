"""Inputs of the planner: models traced without memory, and rates of the machine."""

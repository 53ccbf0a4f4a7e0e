"""What the planner measures: models built and traced without memory, and rates of the machine."""

"""What the planner measures: models built and traced without memory."""

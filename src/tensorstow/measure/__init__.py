"""What the planner counts with: a model that is traced without memory."""

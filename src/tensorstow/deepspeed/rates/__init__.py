"""DeepSpeed's learning rate schedules: formulas, and torch schedulers over them."""

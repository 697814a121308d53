"""How a plan is run: one client after another, in worker processes, or all at once."""

"""Local optimizers, step-size schedules, and the loop of local steps."""

"""What hooks remember from step to step."""

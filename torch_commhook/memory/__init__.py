"""The memory of hooks from step to step."""

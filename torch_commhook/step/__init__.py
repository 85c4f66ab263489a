"""A hook on one bucket, and what the ranks of a step agree on."""

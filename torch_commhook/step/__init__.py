"""A hook on one bucket, and the agreement of the ranks on each step."""

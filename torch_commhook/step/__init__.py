"""Runs a hook on one bucket, and lets the ranks agree on each step."""

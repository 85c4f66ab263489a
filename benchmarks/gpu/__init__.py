"""Runs the checks that need a GPU, and stores the results of each part at once."""

"""Runs on a GPU what only a GPU can show, and stores the results of each part at once."""

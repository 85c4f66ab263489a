"""Buckets of gradients: their layout in memory, and their interface for hooks."""

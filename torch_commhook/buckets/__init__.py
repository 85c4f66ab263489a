"""Buckets of gradients: how they lie in memory, and what a hook is given."""

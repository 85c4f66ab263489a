"""Attaching a hook to a model, and running it on DDP's reducer, ours, or ``fully_shard``."""

"""Averages gradients in backward through a hook, without DDP's reducer."""

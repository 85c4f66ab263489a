"""Hooks on models whose parameters ``fully_shard`` has sharded."""

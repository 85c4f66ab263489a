"""Attaching a hook to a model: the roads that it can take."""

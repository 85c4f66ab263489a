"""Training that continues when ranks are lost, and admits new ranks."""

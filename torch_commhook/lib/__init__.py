"""The folder that the build puts the operator library ``_ops`` into."""

"""The command line ``python -m torch_commhook`` or ``commhook``: one module per subcommand."""

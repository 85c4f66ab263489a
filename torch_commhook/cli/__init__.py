"""The command line: ``python -m torch_commhook`` (also ``commhook``), a module a subcommand."""

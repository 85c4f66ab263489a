"""Hooks in training frameworks: a module for each, which imports the framework.

``lightning``, ``accelerate``, ``transformers`` and ``torchtitan``; ``slurm`` for scripts that
``srun`` starts.
"""

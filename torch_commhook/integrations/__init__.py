"""Hooks in training frameworks: a module for each, which imports the framework.

``lightning``, ``accelerate``, ``transformers``, ``torchtitan`` and ``torchft``; ``slurm`` for
scripts that ``srun`` starts.
"""

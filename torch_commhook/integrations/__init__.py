"""Hooks in training frameworks: one module for each, which imports the framework.

``lightning``, ``accelerate``, ``transformers``, ``torchtitan`` and ``torchft``; ``slurm`` is for
scripts that ``srun`` starts.
"""

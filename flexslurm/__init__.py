"""Serve a large language model on whatever GPUs a Slurm cluster can spare."""

__version__ = "0.1.0"

"""All that talks to Slurm; the only package that starts Slurm commands."""

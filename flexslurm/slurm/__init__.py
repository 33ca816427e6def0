"""All that talks to Slurm: commands, parsing, scripts, the sandbox; the only package that starts Slurm commands."""

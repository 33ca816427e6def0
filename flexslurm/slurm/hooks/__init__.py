"""Files that Slurm runs or loads, to be installed by an admin; `slurm.hook_files` fills them in."""

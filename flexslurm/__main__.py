"""`python -m flexslurm`: the same as the flexslurm command."""

from flexslurm.cli.main import main

if __name__ == "__main__":
    main()

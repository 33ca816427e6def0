"""The flexslurm command; parses, prints and delegates, imports heavy things only where used."""

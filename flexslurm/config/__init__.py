"""Site and service files: schema, loading, errors with file, line and key."""

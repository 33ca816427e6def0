"""Messages between processes, the journal and telemetry; never decides anything."""

"""The head process: puts controller, drivers and gateway together in one event loop."""

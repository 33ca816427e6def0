"""The controller that decides and installs gears, and the agent on each node; never touches tensors."""

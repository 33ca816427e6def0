"""The controller that decides and installs gears, and the agents; never touches tensors."""

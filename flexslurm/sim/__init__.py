"""A simulator that drives the shipped decision modules with a virtual clock."""

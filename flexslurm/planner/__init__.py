"""From a model, a site and a pool to gears; pure: no clock, file, socket or torch."""

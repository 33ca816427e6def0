"""From a model, a site and a pool to gears; pure but for `files`: no clock, socket or torch."""

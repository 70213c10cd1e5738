"""Plants to try controllers on: a simulated ensemble, real policy-gradient training in miniature, and the rivals."""

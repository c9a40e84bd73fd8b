"""Measured figures: the cost of the package compared with a hand-written loop, PhiJAX and plain Orbax."""

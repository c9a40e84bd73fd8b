"""Measured figures: what the package costs beside a hand-written loop, PhiJAX and plain Orbax."""

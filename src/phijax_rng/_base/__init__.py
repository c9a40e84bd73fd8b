"""What every other wing may use: checks, pytrees, digests, exact arithmetic. Private."""

"""The stepped plane over a session (seed 001)."""

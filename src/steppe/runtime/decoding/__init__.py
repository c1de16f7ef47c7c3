"""How sequences advance: one strategy a file."""

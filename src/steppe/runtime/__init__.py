"""One rank's runtime: sequences, their memory and the steps that advance them (seed 002)."""

"""The typed step: the vocabulary that both the engine and the runtime stand on (seed 001)."""

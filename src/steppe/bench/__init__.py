"""Load for a server or an engine, and what it measured: ``steppe bench``."""

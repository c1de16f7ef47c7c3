"""How ranks relate to each other."""

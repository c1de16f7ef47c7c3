"""Memory of computed keys and values: the page pool and who holds which page."""

"""What clients send: one schema per API, checked before anything else happens."""

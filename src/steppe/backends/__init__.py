"""What executes a traced program. Nothing outside this package knows a device."""

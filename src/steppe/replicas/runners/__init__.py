"""The engines that a replica may run on, one kind a module."""

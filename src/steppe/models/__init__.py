"""Architectures as graph programs, one file each, and the registry that finds them.

`steppe.models.registry.load_model` is the door: an open checkpoint becomes a `Model`, ready for a
backend to trace. This room imports numpy, `steppe.backends` (the tape only) and `steppe.formats`.
"""

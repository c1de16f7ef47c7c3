"""Checkpoint readers: a model reference becomes named, memory-mapped tensors and a configuration.

`steppe.formats.checkpoint.open_checkpoint` is the door. This room imports numpy, the standard
library and `steppe.errors` only; `huggingface_hub` is imported when a hub reference is resolved.
"""

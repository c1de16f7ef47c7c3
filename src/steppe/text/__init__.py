"""Text in and out: tokenizers, chat templates, streaming detokenisation and stop rules.

Modules here import ``errors`` and ``formats`` only; nothing in them knows a device or a request.
"""

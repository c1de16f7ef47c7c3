"""Engines at the other end of a network: any server that speaks the OpenAI completions API."""

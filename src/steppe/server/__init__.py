"""The HTTP server: OpenAI-compatible routes over an ``EngineClient`` (extra ``server``)."""

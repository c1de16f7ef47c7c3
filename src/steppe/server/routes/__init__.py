"""The routes, one API a module. They talk to the engine through ``EngineClient`` only."""

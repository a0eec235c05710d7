"""Serving: the engine process, the roles of the Triton backend, the model repository and the server command."""

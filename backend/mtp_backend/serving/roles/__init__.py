"""The roles that the models of a repository play; each is a thin face of the engine process."""

from mtp_backend.serving.roles.role import role_for

__all__ = ["role_for"]

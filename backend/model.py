"""Triton's entry into the mtp backend: a model is the role that its configuration names."""

from __future__ import annotations

import logging
import sys
from typing import Any

import triton_python_backend_utils as pb_utils
from mtp_backend.errors import MtpError
from mtp_backend.serving.roles import role_for


class TritonPythonModel:
    """One model of the repository."""

    def initialize(self, args: dict[str, str]) -> None:
        """Connects to the engine, or starts it."""
        logging.basicConfig(level=logging.INFO, format=f"mtp {args['model_name']}: %(message)s", stream=sys.stderr)
        try:
            self._role = role_for(args)
        except MtpError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Passes requests on; a decoupled model's answers are sent when they are there."""
        return self._role.execute(requests)

    def finalize(self) -> None:
        """Called when the model is unloaded."""
        self._role.finalize()

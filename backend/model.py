"""Triton's entry into the mtp backend: a model is the role that its configuration names."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import triton_python_backend_utils as pb_utils
from mtp_backend.errors import MtpError
from mtp_backend.serving.roles import role_for
from mtp_backend.serving.standstill import Standstill


class TritonPythonModel:
    """One model of the repository."""

    def initialize(self, args: dict[str, str]) -> None:
        """Connects to the engine, or starts it."""
        logging.basicConfig(level=logging.INFO, format=f"mtp {args['model_name']}: %(message)s", stream=sys.stderr)
        try:
            self._role = role_for(args)
        except MtpError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        self._standstill = Standstill()
        threading.Thread(target=self._standstill.watch, daemon=True).start()

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Passes requests on; a decoupled model's answers are sent when they are there."""
        with self._standstill.batch():
            return self._role.execute(requests)

    def finalize(self) -> None:
        """Called when the model is unloaded."""
        self._role.finalize()

"""What `mtp serve` runs, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from mtp_backend.serving.canary import Questions


class Exit(IntEnum):
    """Exit codes of `mtp serve`; 1 and 2 are those of every command: an error, and wrong arguments."""

    STOPPED = 0
    NOT_STARTED = 3
    GAVE_UP = 4
    CUT_OFF = 5


@dataclass(frozen=True)
class Service:
    """What is supervised.

    Attributes:
        command: the server's command line.
        repository: the model repository.
        host: address of its HTTP and metrics ports.
        drain_seconds: how long requests that run may go on after SIGTERM.
        hang_seconds: the engine is ended when its loop shows no sign of life for this long, the server when a model's
            process does not.
        questions: what it must have answered to be ready.
    """

    command: list[str]
    repository: Path
    host: str
    http_port: int
    metrics_port: int
    drain_seconds: int
    hang_seconds: int
    questions: Questions

"""What all roles share: reading the model's configuration, the connection to the engine, and answering."""

from __future__ import annotations

import json
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtp_backend.config import EngineConfig
from mtp_backend.engine.tokenizer import encode, load_tokenizer
from mtp_backend.errors import InvalidArgument, MtpError
from mtp_backend.serving import triton_io
from mtp_backend.serving.engine_client import EngineClient
from mtp_backend.serving.messages import Message
from mtp_backend.serving.rendezvous import OWNER
from mtp_backend.serving.roles.metrics import Metrics

log = logging.getLogger("mtp.role")
Submission = tuple[Callable[[int], Message], "TritonReply"]


class TritonReply(ABC):
    """Sends the engine's answers to one Triton request. Implements `engine_client.Reply`."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._finished = False

    @abstractmethod
    def answer(self, message: Message) -> None:
        """Sends one answer."""

    def fail(self, error: MtpError) -> None:
        """Sends the error that ends the request."""
        with self._lock:
            self._finished = True
            triton_io.send_error(self._sender, error)

    def is_cancelled(self) -> bool:
        """Whether the client has withdrawn the request."""
        # Asking about a request that has had its last answer crashes the server.
        with self._lock:
            return not self._finished and self._sender.is_cancelled()

    def send(self, tensors: list[Any], final: bool) -> None:
        """Sends one response."""
        with self._lock:
            self._finished = final
            triton_io.send(self._sender, tensors, final)


class CollectedRequest:
    """A request of a model that answers its batch at once; stands in for the request and for its response sender.

    A model that is not decoupled hands its answers back from `execute`: while it sent them from another thread, the
    packaged server was once seen to end with a corrupted heap.
    """

    def __init__(self, request: Any) -> None:
        self._request = request
        self._answered = threading.Event()
        self._response: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def get_response_sender(self) -> CollectedRequest:
        """The place where the one answer is kept."""
        return self

    def send(self, response: Any, flags: int) -> None:
        """Keeps the answer."""
        self._response = response
        self._answered.set()

    def response(self) -> Any:
        """Waits for the answer."""
        self._answered.wait()
        return self._response


class Role(ABC):
    """One model of the repository.

    A decoupled role passes requests on and its answers are sent from the engine client's thread, each as soon as it is
    there. The others wait until their batch is answered.

    Args:
        arguments: Triton's `initialize` arguments.

    Raises:
        MtpError: a parameter is missing or wrong, or the engine cannot start.
    """

    decoupled = False
    has_metrics = False

    def __init__(self, arguments: dict[str, str]) -> None:
        parameters = json.loads(arguments["model_config"])["parameters"]
        config_file = _engine_config(parameters, Path(arguments["model_repository"]))
        config = EngineConfig.from_json(config_file)
        self._tokenizer = load_tokenizer(Path(config.model))
        self._metrics = None
        if self.has_metrics:
            labels = {"model": arguments["model_name"], "version": arguments["model_version"]}
            self._metrics = Metrics(labels, config.num_drafts)
        owner_pid = int(os.environ.get(OWNER) or os.getppid())
        self.client = EngineClient(config_file, owner_pid, self._metrics)
        vocabulary = self._tokenizer.get_vocab() if self._tokenizer else {}
        self._longest_token = max(map(len, vocabulary), default=0)

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Passes a batch of requests to the engine in one frame; returns their answers unless the role is decoupled."""
        if not self.decoupled:
            requests = [CollectedRequest(request) for request in requests]
        submissions = []
        for request in requests:
            try:
                triton_io.check_id(request)
                submission = self.submission(request)
            except MtpError as error:
                triton_io.send_error(request.get_response_sender(), error)
            except UnicodeDecodeError as error:  # the server passes on what it does not read itself
                wrong = InvalidArgument("request", error.object, "UTF-8 in ids, names and parameters")
                triton_io.send_error(request.get_response_sender(), wrong)
            except Exception as error:
                # The server crashes when this batch fails as a whole after some of it has been answered.
                log.exception("a request could not be read")
                triton_io.send_error(request.get_response_sender(), MtpError(f"{type(error).__name__}: {error}"))
            else:
                if submission is not None:
                    submissions.append(submission)
        self.client.submit(submissions)
        return None if self.decoupled else [request.response() for request in requests]

    def finalize(self) -> None:
        """Takes leave of the engine."""
        self.client.close()
        # Metrics that live until the interpreter ends ask for memory that is gone by then: the process would crash.
        del self.client, self._metrics

    @abstractmethod
    def submission(self, request: Any) -> Submission | None:
        """What to ask the engine for a request, and where its answers go; None if it has been answered.

        Raises:
            MtpError: the request is wrong.
        """

    def tokenize(self, field: str, text: str, *, start: bool = True) -> list[int]:
        """Text to token ids; `start` adds the special tokens that a text begins with.

        Raises:
            InvalidArgument: the text is empty or cannot fit the model's limit, or the checkpoint has no tokenizer.
        """
        # Tokenising takes time in proportion to the text, so refuse first what no tokenisation can make fit.
        limit = self.client.max_model_len * self._longest_token
        if self._tokenizer is not None and len(text) > limit:
            raise InvalidArgument(field, f"{len(text)} characters", f"at most {limit} characters")
        token_ids = encode(self._tokenizer, field, text, start=start)
        if len(token_ids) >= self.client.max_model_len:
            allowed = f"1 … {self.client.max_model_len - 1} tokens (max_model_len − 1)"
            raise InvalidArgument(field, f"{len(token_ids)} tokens", allowed)
        return token_ids

    def decode(self, token_ids: list[int]) -> str:
        """Token ids to text, special tokens included; there is a tokenizer, or there were no text to tokenise."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def role_for(arguments: dict[str, str]) -> Role:
    """Makes the role that a model's configuration names."""
    from mtp_backend.serving.roles.draft import DraftRole
    from mtp_backend.serving.roles.generate import EnsembleRole, GenerateRole
    from mtp_backend.serving.roles.main import MainRole

    roles = {"main": MainRole, "draft": DraftRole, "generate": GenerateRole, "ensemble": EnsembleRole}
    parameters = json.loads(arguments["model_config"])["parameters"]
    name = parameters.get("role", {}).get("string_value")
    if name not in roles:
        raise InvalidArgument("parameters.role", name, "one of " + ", ".join(sorted(roles)))
    return roles[name](arguments)


def _engine_config(parameters: dict[str, Any], model_directory: Path) -> Path:
    """The engine configuration file; a relative path starts at the folder of the model repository."""
    value = parameters.get("engine_config", {}).get("string_value")
    if not value:
        raise InvalidArgument("parameters.engine_config", value, "the path of an engine configuration file")
    path = model_directory.parent / value
    if not path.is_file():
        raise InvalidArgument("parameters.engine_config", str(path), "an existing file")
    return path

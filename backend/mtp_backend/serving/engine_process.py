"""The engine process: loads an engine and serves it on the roles' socket."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from mtp_backend.config import EngineConfig
from mtp_backend.engine.engine import Engine
from mtp_backend.environment import unbound
from mtp_backend.errors import InvalidArgument, MtpError
from mtp_backend.serving.engine_loop import EngineLoop
from mtp_backend.serving.rendezvous import Rendezvous

if TYPE_CHECKING:
    from mtp_backend.serving.tracing import Tracing

log = logging.getLogger("mtp.engine")


def main() -> None:
    """Entry of `python -m mtp_backend.serving.engine_process`."""
    parser = argparse.ArgumentParser(description="Engine of the mtp backend; the backend starts it.")
    parser.add_argument("--config", required=True, help="engine configuration, JSON")
    parser.add_argument("--directory", required=True, help="rendezvous directory of this engine")
    parser.add_argument("--server-pid", type=int, required=True, help="process to end with")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="mtp engine %(process)d: %(message)s", stream=sys.stderr)
    rendezvous = Rendezvous(Path(arguments.directory))
    # The server's limit (tritonserver.py), which its processes inherit, is not for a network.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    # Ctrl-C in a terminal reaches the server, which then dismisses its engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        server = os.pidfd_open(arguments.server_pid)
    except ProcessLookupError:
        log.error("the inference server has ended")
        rendezvous.withdraw()
        sys.exit(1)
    try:
        started = time.monotonic()
        config = EngineConfig.from_json(arguments.config)
        _check_served(config)
        log.info("loading %s", config.model)
        engine = Engine(config)
        gc.freeze()  # modules, tokenizer and libraries: collections need not look through them again and again
        with unbound(arguments.server_pid):
            tracing = _tracing(config, engine)
    except MtpError as error:
        rendezvous.report_failure(error)
        log.error("%s", error)
        sys.exit(1)
    with unbound(arguments.server_pid):
        socket = zmq.Context.instance().socket(zmq.ROUTER)  # the first one starts the library's thread
        loop = EngineLoop(engine, socket, server, rendezvous.show_life, tracing)  # and this the grammars'
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(rendezvous.address)
    signal.signal(signal.SIGTERM, loop.stop)
    rendezvous.announce()
    log.info(
        "ready in %.1f s: %s, k = %d, %d blocks of %d tokens",
        time.monotonic() - started,
        config.model,
        engine.num_drafts,
        engine.pool.num_blocks,
        config.block_size,
    )
    loop.run()
    socket.close()
    zmq.Context.instance().term()  # waits for the last answers, at most the socket's linger time
    if tracing is not None:
        tracing.close()
    rendezvous.withdraw()
    os._exit(0)  # the interpreter would free networks and libraries piece by piece first, which takes seconds


def _tracing(config: EngineConfig, engine: Engine) -> Tracing | None:
    """What makes spans, if they are asked for; the packages for them are optional."""
    if not config.otlp_endpoint:
        return None
    try:
        from mtp_backend.serving.tracing import Tracing, otlp_exporter
    except ModuleNotFoundError as error:
        allowed = f"nothing without the package {error.name}: pip install 'mtp-backend[tracing]'"
        raise InvalidArgument("otlp_endpoint", config.otlp_endpoint, allowed) from None
    return Tracing(otlp_exporter(config.otlp_endpoint), engine.totals, time.monotonic)


def _check_served(config: EngineConfig) -> None:
    """Refuses what is for offline benchmarks alone."""
    if config.speculative and config.speculative.rejection_sample_method == "lossy_synthetic":
        raise InvalidArgument(
            "speculative.rejection_sample_method",
            "lossy_synthetic",
            "strict, probabilistic, block, lossy_relaxed (synthetic acceptance is for the offline LLM alone)",
        )


if __name__ == "__main__":
    main()

"""The command `mtp serve`."""

from __future__ import annotations

import argparse
import logging
import resource
import sys
from pathlib import Path

from mtp_backend.config import EngineConfig
from mtp_backend.errors import InvalidArgument
from mtp_backend.serving import tritonserver
from mtp_backend.serving.access import access
from mtp_backend.serving.canary import questions
from mtp_backend.serving.repository import ENGINE_FILE, check_models
from mtp_backend.serving.service import Service
from mtp_backend.serving.shared_memory import Regions
from mtp_backend.serving.supervisor import Supervisor

log = logging.getLogger("mtp.serve")
FEW_FILES = 1024
EPILOG = """exit codes: 0 ended by SIGTERM or SIGINT; 1 no server is installed; 2 wrong arguments or configuration, or a
port in use; 3 the server did not start; 4 it was started again too often without success; 5 ended by a signal with
requests cut off. A second signal ends it at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.epilog = EPILOG
    parser.add_argument("repository", type=Path, help="folder made by `mtp repository create`")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--http-port", type=_port, default=8000, metavar="PORT", help="8000")
    parser.add_argument("--grpc-port", type=_port, default=8001, metavar="PORT", help="8001")
    parser.add_argument("--metrics-port", type=_port, default=8002, metavar="PORT", help="8002")
    parser.add_argument(
        "--key-file", type=Path, help="file of the key that opens the administrative endpoints (nobody can)"
    )
    parser.add_argument("--grpc-tls-cert", type=Path, metavar="PEM", help="certificate of the gRPC port (no TLS)")
    parser.add_argument("--grpc-tls-key", type=Path, metavar="PEM", help="its private key")
    parser.add_argument("--grpc-tls-client-ca", type=Path, metavar="PEM", help="clients need a certificate of these")
    parser.add_argument(
        "--drain-seconds", type=_seconds, default=30, help="how long requests may go on after SIGTERM (30)"
    )
    parser.add_argument(
        "--hang-seconds",
        type=_seconds_of_silence,
        default=300,
        help="a process that shows no sign of life for this long is ended; 5 or more (300)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal comes; returns the exit code."""
    if not (arguments.repository / ENGINE_FILE).is_file():
        raise InvalidArgument("repository", str(arguments.repository), "a folder made by `mtp repository create`")
    check_models(arguments.repository)
    config = EngineConfig.from_json(arguments.repository / ENGINE_FILE)
    reached = access(
        arguments.host,
        (arguments.http_port, arguments.grpc_port, arguments.metrics_port),
        arguments.key_file,
        arguments.grpc_tls_cert,
        arguments.grpc_tls_key,
        arguments.grpc_tls_client_ca,
    )
    launcher = tritonserver.install(tritonserver.directory())
    logging.basicConfig(level=logging.INFO, format="mtp serve: %(message)s", stream=sys.stderr)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files < FEW_FILES:
        log.warning("only %d files may be open (ulimit -H -n), of which each connection is one: raise this", most_files)
    options = tritonserver.arguments(arguments.repository, arguments.drain_seconds, traced=bool(config.otlp_endpoint))
    options += reached.options()
    service = Service(
        [str(launcher), *options],
        arguments.repository,
        arguments.host,
        arguments.http_port,
        arguments.metrics_port,
        arguments.drain_seconds,
        arguments.hang_seconds,
        questions(arguments.repository, has_tokenizer=(Path(config.model) / "tokenizer.json").is_file()),
    )
    return Supervisor(service, Regions()).run()


def _port(text: str) -> int:
    return _integer(text, 1, 65535)


def _seconds(text: str) -> int:
    return _integer(text, 1, 86400)


def _seconds_of_silence(text: str) -> int:
    return _integer(text, 5, 86400)  # healthy processes show life every 2 s


def _integer(text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: {low} … {high}")
    return int(text)

"""The command `mtp-client gateway`."""

from __future__ import annotations

import argparse
import os

import uvicorn

from mtp_client import chat
from mtp_client.errors import InvalidArgument
from mtp_client.gateway.app import Gateway, Settings
from mtp_client.gateway.connection import is_loopback
from mtp_client.tls import from_options
from mtp_client.transports import default_url

_API_KEY_VARIABLE = "MTP_GATEWAY_API_KEY"
_STOP_S = 5  # for answers in progress when the gateway is told to end


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it; 1 if the port cannot be had. Raises InvalidArgument for wrong options."""
    api_key = args.api_key or os.environ.get(_API_KEY_VARIABLE, "")
    if not api_key and not is_loopback(args.host):
        allowed = f"a loopback address, or any with --api-key or {_API_KEY_VARIABLE}"
        raise InvalidArgument(f"--host: got {args.host!r}; allowed: {allowed}")
    if not 0 < args.port < 65536:
        raise InvalidArgument(f"--port: got {args.port}; allowed: 1 … 65535")
    if not args.timeout > 0:
        raise InvalidArgument(f"--timeout: got {args.timeout:g}; allowed: above 0")
    settings = Settings(
        url=args.url or default_url("grpc"),
        model=args.model,
        served_model_name=args.served_model_name or (args.tokenizer.resolve().name if args.tokenizer else "mtp"),
        template=chat.load(args.tokenizer, args.chat_template),
        api_key=api_key,
        timeout=args.timeout,
        tls=from_options(args),
    )
    try:
        uvicorn.run(Gateway(settings).app(), host=args.host, port=args.port, timeout_graceful_shutdown=_STOP_S)
    except SystemExit:  # its log says why
        return 1
    return 0

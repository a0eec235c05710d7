"""TLS between client and server."""

from __future__ import annotations

import argparse
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from mtp_client.errors import InvalidArgument


@dataclass(frozen=True)
class Tls:
    """How the server proves who it is, and how this client does: paths of PEM files.

    `ca`: authorities that may have signed the server's certificate; None takes the usual ones.
    `cert`, `key`: this client's own, both or neither, for a server that wants them.
    Raises InvalidArgument: a file cannot be read, or one of `cert` and `key` alone.
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidArgument(f"tls.cert: got {self.cert!r}; allowed: a file together with tls.key, or neither")
        for name in ("ca", "cert", "key"):
            _read(name, getattr(self, name))

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a gRPC channel."""
        return grpc.ssl_channel_credentials(_read("ca", self.ca), _read("key", self.key), _read("cert", self.cert))

    def context(self) -> ssl.SSLContext:
        """For HTTP. Raises InvalidArgument: a file holds no certificate or key."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except ssl.SSLError as error:
            raise InvalidArgument(f"tls: {error}; allowed: PEM files of certificates and their key") from error
        return context


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a command line for a `Tls`."""
    parser.add_argument("--tls", action="store_true", help="TLS, with a server whose authority this host knows")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="TLS, with a server of these authorities (PEM)")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="this client's certificate, with --tls-key")
    parser.add_argument("--tls-key", type=Path, metavar="FILE")


def from_options(args: argparse.Namespace) -> Tls | None:
    """None without any of the options. Raises InvalidArgument."""
    files = (args.tls_ca, args.tls_cert, args.tls_key)
    return Tls(*files) if args.tls or any(files) else None


def _read(name: str, path: str | Path | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"tls.{name}: {error}") from error

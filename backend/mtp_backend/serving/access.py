"""Who reaches the server, and what of it: addresses, the key of the administrative endpoints, and TLS."""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from mtp_backend.errors import InvalidArgument

# Endpoints that read or change the server itself; clients that generate need none of them.
RESTRICTED = ("shared-memory", "model-repository", "statistics", "trace", "logging")
KEY_NAME = "mtp-key"  # header of HTTP; over gRPC the server puts "triton-grpc-protocol-" before it
KEY = re.compile(r"[A-Za-z0-9_-]{16,256}")


@dataclass(frozen=True)
class Tls:
    """PEM files of the gRPC port.

    Attributes:
        client_authority: certificates that clients must be signed by; None lets every client in.
    """

    certificate: Path
    private_key: Path
    client_authority: Path | None


@dataclass(frozen=True)
class Access:
    """Attributes:
    host: address of all ports.
    key: opens the restricted endpoints.
    tls: of the gRPC port, None for none.
    """

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    key: str
    tls: Tls | None

    def options(self) -> list[str]:
        """The server's options."""
        restricted = f"{','.join(RESTRICTED)}:{KEY_NAME}={self.key}"
        options = [
            f"--http-address={self.host}",
            f"--http-port={self.http_port}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-address={self.host}",
            f"--metrics-port={self.metrics_port}",
            f"--http-restricted-api={restricted}",
            f"--grpc-restricted-protocol={restricted}",
        ]
        if self.tls is not None:
            options += [
                "--grpc-use-ssl=true",
                f"--grpc-server-cert={self.tls.certificate}",
                f"--grpc-server-key={self.tls.private_key}",
            ]
            if self.tls.client_authority is not None:
                options += ["--grpc-use-ssl-mutual=true", f"--grpc-root-cert={self.tls.client_authority}"]
        return options


def access(
    host: str,
    ports: tuple[int, int, int],
    key_file: Path | None,
    certificate: Path | None,
    private_key: Path | None,
    client_authority: Path | None,
) -> Access:
    """Checks the arguments of `mtp serve`.

    Args:
        ports: of HTTP, gRPC and metrics.
        key_file: None makes a key that nobody knows.

    Raises:
        InvalidArgument: an address beyond loopback without a key, a port in use, a file that cannot be used.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise InvalidArgument("--host", host, "an IP address") from None
    if not address.is_loopback and key_file is None:
        raise InvalidArgument("--host", host, "a loopback address; any other needs --key-file (docs/security.md)")
    names = ("--http-port", "--grpc-port", "--metrics-port")
    for number, (name, port) in enumerate(zip(names, ports, strict=True)):
        if port in ports[:number]:
            raise InvalidArgument(name, port, "a port that no other option names")
        _check_free(name, host, port)
    key = secrets.token_urlsafe(32) if key_file is None else read_key(key_file)
    return Access(host, *ports, key, _tls(certificate, private_key, client_authority))


def read_key(file: Path) -> str:
    """Reads a key file: one line, readable by its owner alone.

    Raises:
        InvalidArgument: it is not such a file.
    """
    _check_readable("--key-file", file)
    if file.stat().st_mode & 0o077:
        raise InvalidArgument("--key-file", str(file), "a file that only its owner can read (chmod 600)")
    key = file.read_text(errors="replace").strip()
    if not KEY.fullmatch(key):
        raise InvalidArgument("--key-file", str(file), "a file of one line of 16 … 256 characters A-Z a-z 0-9 _ -")
    return key


def _tls(certificate: Path | None, private_key: Path | None, client_authority: Path | None) -> Tls | None:
    files = {
        "--grpc-tls-cert": certificate,
        "--grpc-tls-key": private_key,
        "--grpc-tls-client-ca": client_authority,
    }
    for name, file in files.items():
        if file is not None:
            _check_readable(name, file)
    if certificate is None and private_key is None and client_authority is None:
        return None
    for name in ("--grpc-tls-cert", "--grpc-tls-key"):
        if files[name] is None:
            raise InvalidArgument(name, None, "a PEM file: certificate and key belong together")
    return Tls(certificate, private_key, client_authority)


def _check_readable(name: str, file: Path) -> None:
    try:
        file.read_bytes()
    except OSError as error:
        raise InvalidArgument(name, str(file), f"a readable file ({error.strerror})") from None


def _check_free(name: str, host: str, port: int) -> None:
    """The server itself tells of a port in use only after its models are loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()  # SO_REUSEADDR lets two sockets have one address until one of them listens
        except OSError as error:
            raise InvalidArgument(name, port, f"a port that can be had on {host} ({error.strerror})") from None

"""nginx with the configuration that docs/deploy recommends."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from server.running import ROOT, free_ports, wait_for

CONFIGURATION = ROOT / "docs" / "deploy" / "nginx.conf"
USER, PASSWORD = "client", "a password"


def program():
    """The host's nginx, else that of its distribution's package, unpacked beside the Python environment."""
    if found := shutil.which("nginx"):
        return found
    folder = Path(sys.prefix) / "nginx"
    if not folder.exists():
        if not all(map(shutil.which, ("apt-get", "dpkg-deb"))):
            pytest.skip("no nginx, and no apt-get and dpkg-deb to get it with")
        new = Path(tempfile.mkdtemp(dir=sys.prefix))
        try:
            got = subprocess.run(["apt-get", "-q", "download", "nginx"], cwd=new, capture_output=True, text=True)
            if got.returncode:
                pytest.skip(f"no nginx, and apt-get cannot download it: {got.stderr.strip().splitlines()[-1]}")
            [package] = new.glob("nginx_*.deb")
            subprocess.run(["dpkg-deb", "-x", package, new / "files"], check=True)
            (new / "files").rename(folder)
        finally:
            shutil.rmtree(new)
    found = folder / "usr" / "sbin" / "nginx"
    if subprocess.run([found, "-v"], capture_output=True).returncode:
        pytest.skip("the nginx of the distribution's package lacks libraries on this host")
    return found


def configuration(folder, certificates, port, upstream):
    """The file of docs/deploy with what a deployment replaces, and the paths that a packaged nginx has built in."""
    text = CONFIGURATION.read_text()
    temporary = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"    {name}_temp_path {folder}/{name};\n" for name in temporary)
    for old, new in [
        ("http {\n", f"http {{\n{paths}    access_log off;\n"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("/etc/mtp/server.pem", certificates / "server.pem"),
        ("/etc/mtp/server.key", certificates / "server.key"),
        ("/etc/mtp/users", folder / "users"),
        ("127.0.0.1:8000", upstream),
        ("worker_processes auto", "worker_processes 1"),
    ]:
        assert text.count(old) == 1, old
        text = text.replace(old, str(new))
    return text


@contextmanager
def running_proxy(certificates, upstream):
    """Runs nginx in front of host:port `upstream`; gives its own port on 127.0.0.1."""
    command = [program(), "-p", None, "-c", "nginx.conf", "-e", "log"]
    [port] = free_ports(1)
    # Directly in the system's folder, readable for the user that its workers run as.
    folder = Path(tempfile.mkdtemp(prefix="mtp-nginx-"))
    folder.chmod(0o755)
    try:
        (folder / "nginx.conf").write_text(configuration(folder, certificates, port, upstream))
        hashed = subprocess.run(["openssl", "passwd", "-6", PASSWORD], check=True, capture_output=True, text=True)
        (folder / "users").write_text(f"{USER}:{hashed.stdout}")
        command[2] = folder
        options = f"daemon off; pid {folder}/pid;" + (" user root;" if os.getuid() == 0 else "")
        process = subprocess.Popen([*command, "-g", options], stderr=subprocess.DEVNULL)

        def ready():
            assert process.poll() is None, (folder / "log").read_text()
            try:
                with socket.create_connection(("127.0.0.1", int(port)), timeout=5):
                    return True
            except OSError:
                return False

        try:
            wait_for(ready, 60, "nginx")
            yield int(port)
        finally:
            process.terminate()
            process.wait(60)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

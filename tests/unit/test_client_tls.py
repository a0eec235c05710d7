"""TLS of the client: what it refuses before anything is sent."""

import argparse

import pytest
from mtp_client import Client, InvalidArgument, Tls
from mtp_client.tls import add_options, from_options


def test_refused(tmp_path):
    other = tmp_path / "other.pem"
    other.write_text("no certificate")
    with pytest.raises(InvalidArgument, match=r"tls\.cert: got None; allowed: a file together with tls\.key"):
        Tls(key=other)
    with pytest.raises(InvalidArgument, match=r"tls\.ca: .*No such file"):
        Tls(ca=tmp_path / "missing.pem")
    for files in ({"ca": other}, {"cert": other, "key": other}):
        with pytest.raises(InvalidArgument, match="tls: .*allowed: PEM files"):
            Client("127.0.0.1:1", "http", tls=Tls(**files))


def test_options(tmp_path):
    """Without any there is no TLS; a file is enough to ask for it."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    ca = tmp_path / "ca.pem"
    ca.write_text("")
    assert from_options(parser.parse_args([])) is None
    assert from_options(parser.parse_args(["--tls"])) == Tls()
    assert from_options(parser.parse_args(["--tls-ca", str(ca)])) == Tls(ca)
    with pytest.raises(InvalidArgument, match="tls.cert"):
        from_options(parser.parse_args(["--tls-cert", str(ca)]))


def test_the_scheme_follows():
    """A host and port alone is https with TLS; a URL with a scheme is taken as it is."""
    for url, tls, wanted in [
        ("a:1", None, "http://a:1"), ("a:1", Tls(), "https://a:1"), ("http://a:1", Tls(), "http://a:1"),
        ("https://n:p@a:1", None, "https://n:p@a:1"),
    ]:  # fmt: skip
        with Client(url, "http", tls=tls) as client:
            assert str(client._transport._http.base_url) == wanted

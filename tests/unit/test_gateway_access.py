"""What the gateway lets in: keys, hosts, and bodies."""

import httpx
import pytest
from fake_gateway import post, running, running_server
from mtp_client.gateway.connection import MAX_BODY_BYTES


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def gateway(server):
    with running(server.url) as url:
        yield url


@pytest.mark.parametrize(
    ("content", "headers", "status", "message"),
    [
        (b"{}", {}, 415, "Content-Type"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "Content-Type"),
        (b"{}", {"Content-Type": "Application/JSON; charset=utf-8"}, 400, "model: missing"),
        (b"{", None, 400, "not JSON"),
        (b"[1]", None, 400, "must be a JSON object"),
        (b'{"prompt": "\xff"}', None, 400, "not JSON"),
        (b'{"prompt": "\\ud800"}', None, 400, "not JSON"),
        (b"[" * 100_000, None, 400, "not JSON"),
        (b'{"n": ' + b"1" * 5000 + b"}", None, 400, "not JSON"),
        (b" " * (MAX_BODY_BYTES + 1), None, 413, "larger than"),
        (b'{"model": "other", "prompt": "a"}', None, 404, "model: got 'other'; allowed: tiny"),
        (b'{"model": "tiny", "prompt": ["a", "b"], "n": 33}', None, 400, "n: got 33; allowed: at most 64"),
    ],
)
def test_bad_requests(gateway, content, headers, status, message):
    response = post(gateway, content=content, headers=headers)
    assert response.status_code == status and message in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert post(gateway).status_code == 200


def test_api_key(server):
    with running(server.url, api_key="secret ä") as url:
        for key in (None, "secret", "secret äö", ""):
            headers = {"Content-Type": "application/json"} | (
                {"Authorization": f"Bearer {key}".encode("latin-1")} if key else {}
            )
            for response in (
                post(url, headers=headers),
                httpx.get(f"{url}/v1/models", headers=headers, trust_env=False),
            ):
                assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        right = {"Content-Type": "application/json", "Authorization": "bearer secret ä".encode("latin-1")}
        assert post(url, headers=right).status_code == 200
        assert httpx.get(f"{url}/", trust_env=False).status_code == 200
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200


@pytest.mark.parametrize("host", ["example.org", "example.org:9000", "127.0.0.1.example.org", "10.0.0.1", "[::2]"])
def test_host_without_a_key(server, gateway, host):
    """A page of another site whose name points here is not answered; with a key every name is."""
    headers = {"Content-Type": "application/json", "Host": host}
    assert post(gateway, headers=headers).status_code == 403
    with running(server.url, api_key="key") as url:
        assert post(url, headers={**headers, "Authorization": "Bearer key"}).status_code == 200


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "127.1.2.3:80", "[::1]:9000"])
def test_loopback_hosts(gateway, host):
    assert post(gateway, headers={"Content-Type": "application/json", "Host": host}).status_code == 200

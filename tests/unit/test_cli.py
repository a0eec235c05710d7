import pytest
from mtp_backend.errors import MtpError
from mtp_backend.serving import cli, tritonserver


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "engine.json").write_text("{}")
    return tmp_path


@pytest.fixture
def executed(monkeypatch):
    """What the process would have become."""
    calls = []
    monkeypatch.setattr(tritonserver, "install", lambda directory: directory / "tritonserver")
    monkeypatch.setattr(cli.os, "execv", lambda path, arguments: calls.append(arguments) or 0)
    return calls


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["repository"],
        ["repository", "create"],
        ["serve"],
        ["serve", "r", "--http-port", "x"],
        ["export-mtp"],
        ["export-mtp", "--input-dir", "i"],
    ],
)
def test_wrong_arguments(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2 and "usage: mtp" in capsys.readouterr().err


def test_serve(executed, repository):
    cli.main(["serve", str(repository), "--http-port", "1", "--grpc-port", "2", "--metrics-port", "3"])
    [[launcher, *options]] = executed
    assert launcher.endswith("tritonserver/tritonserver")
    assert f"--model-repository={repository}" in options and "--model-control-mode=none" in options
    assert {"--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1"} <= set(options)
    assert {"--http-port=1", "--grpc-port=2", "--metrics-port=3"} <= set(options)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost", ""])
def test_serve_elsewhere(executed, repository, capsys, host):
    assert cli.main(["serve", str(repository), "--host", host]) == 2
    assert f"--host: got '{host}'; allowed: a loopback address" in capsys.readouterr().err
    assert not executed


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_serve_on_another_loopback(executed, repository, host):
    cli.main(["serve", str(repository), "--host", host])
    assert f"--http-address={host}" in executed[0]


def test_serve_no_repository(executed, tmp_path, capsys):
    assert cli.main(["serve", str(tmp_path)]) == 2
    assert "repository: got" in capsys.readouterr().err and not executed


def test_server_missing(monkeypatch, repository, capsys):
    monkeypatch.setattr(
        tritonserver, "install", lambda directory: (_ for _ in ()).throw(MtpError("no Triton server: …"))
    )
    assert cli.main(["serve", str(repository)]) == 1
    assert capsys.readouterr().err == "mtp: no Triton server: …\n"


def test_install_server(executed, tmp_path, capsys):
    assert cli.main(["install-server", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/tritonserver\n"

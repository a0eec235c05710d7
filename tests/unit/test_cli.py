import json
import socket
from contextlib import ExitStack

import pytest
from mtp_backend.errors import MtpError
from mtp_backend.serving import cli, serve, tritonserver


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "engine.json").write_text(json.dumps({"model": "checkpoint"}))
    return tmp_path


@pytest.fixture
def supervised(monkeypatch):
    """The services that would have been run."""
    services = []

    class Supervisor:
        def __init__(self, service, regions):
            services.append(service)

        def run(self):
            return 5

    monkeypatch.setattr(tritonserver, "install", lambda directory: directory / "tritonserver")
    monkeypatch.setattr(serve, "Supervisor", Supervisor)
    monkeypatch.setattr(serve, "Regions", lambda: None)
    return services


@pytest.fixture
def ports():
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]


@pytest.fixture
def command(repository, ports):
    """A command line on free ports."""
    return ["serve", str(repository), "--http-port", ports[0], "--grpc-port", ports[1], "--metrics-port", ports[2]]


@pytest.fixture
def key_file(tmp_path):
    file = tmp_path / "key"
    file.write_text("0123456789abcdef-_X\n")
    file.chmod(0o600)
    return file


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["repository"],
        ["repository", "create"],
        ["serve"],
        ["serve", "r", "--http-port", "x"],
        ["serve", "r", "--hang-seconds", "4"],
        ["export-mtp"],
        ["export-mtp", "--input-dir", "i"],
    ],
)
def test_wrong_arguments(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2 and "usage: mtp" in capsys.readouterr().err


def test_serve(supervised, command, repository, ports):
    assert cli.main(command) == 5
    [service] = supervised
    launcher, *options = service.command
    assert launcher.endswith("tritonserver/tritonserver")
    assert f"--model-repository={repository}" in options and "--model-control-mode=none" in options
    for kind, port in zip(("http", "grpc", "metrics"), ports, strict=True):
        assert {f"--{kind}-address=127.0.0.1", f"--{kind}-port={port}"} <= set(options)
    assert (service.http_port, service.metrics_port) == (int(ports[0]), int(ports[2]))
    assert (service.drain_seconds, service.hang_seconds, service.questions) == (30, 300, [])
    assert "--exit-timeout-secs=35" in options


@pytest.mark.parametrize("tokenizer", [False, True])
def test_first_questions(supervised, command, repository, tokenizer):
    """To the models that there are; a text only where there is a tokenizer."""
    for folder in ("speculative", "generate", "checkpoint"):
        (repository / folder).mkdir()
    if tokenizer:
        (repository / "checkpoint" / "tokenizer.json").touch()
    cli.main(command)
    asked = [path for path, _ in supervised[0].questions]
    assert asked == ["/v2/models/speculative/infer", "/v2/models/generate/generate"][: 1 + tokenizer]


RESTRICTED = "shared-memory,model-repository,statistics,trace,logging:mtp-key="


def restricted(options):
    """What the options give as key of the restricted endpoints, over HTTP and gRPC."""
    names = (f"--http-restricted-api={RESTRICTED}", f"--grpc-restricted-protocol={RESTRICTED}")
    [(http, grpc)] = zip(*([o[len(name) :] for o in options if o.startswith(name)] for name in names), strict=True)
    assert http == grpc
    return http


def test_restricted_without_key(supervised, command):
    """Nobody has the key: it is drawn for each start."""
    keys = set()
    for _ in range(2):
        cli.main(command)
        keys.add(restricted(supervised[-1].command))
    assert len(keys) == 2 and all(len(key) > 30 for key in keys)


def test_restricted_with_key(supervised, command, key_file):
    cli.main([*command, "--key-file", str(key_file)])
    assert restricted(supervised[0].command) == "0123456789abcdef-_X"


@pytest.mark.parametrize(
    "key", ["", "short", "a" * 257, "0123456789 abcdef", "0123456789abcde=", "0123456789\nabcdefgh", "ü" * 20]
)
def test_key_refused(supervised, command, key_file, capsys, key):
    key_file.write_text(key)
    assert cli.main([*command, "--key-file", str(key_file)]) == 2
    assert "allowed: a file of one line of 16 … 256 characters" in capsys.readouterr().err and not supervised


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_key_that_others_can_read(supervised, command, key_file, capsys, mode):
    key_file.chmod(mode)
    assert cli.main([*command, "--key-file", str(key_file)]) == 2
    assert "allowed: a file that only its owner can read (chmod 600)" in capsys.readouterr().err and not supervised


@pytest.mark.parametrize("option", ["--key-file", "--grpc-tls-cert", "--grpc-tls-key", "--grpc-tls-client-ca"])
def test_file_missing(supervised, command, tmp_path, capsys, option):
    assert cli.main([*command, option, str(tmp_path / "none")]) == 2
    assert f"{option}: got '{tmp_path}/none'; allowed: a readable file" in capsys.readouterr().err and not supervised


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_serve_elsewhere(supervised, command, capsys, host):
    assert cli.main([*command, "--host", host]) == 2
    message = f"--host: got '{host}'; allowed: a loopback address; any other needs --key-file"
    assert message in capsys.readouterr().err and not supervised


@pytest.mark.parametrize("host", ["localhost", "", "example.com"])
def test_serve_no_address(supervised, command, capsys, host):
    assert cli.main([*command, "--host", host]) == 2
    assert f"--host: got '{host}'; allowed: an IP address" in capsys.readouterr().err and not supervised


def test_serve_elsewhere_with_key(supervised, command, key_file):
    cli.main([*command, "--host", "0.0.0.0", "--key-file", str(key_file)])
    assert {f"--{kind}-address=0.0.0.0" for kind in ("http", "grpc", "metrics")} <= set(supervised[0].command)


def test_serve_on_another_loopback(supervised, command):
    cli.main([*command, "--host", "127.0.0.2"])
    assert "--http-address=127.0.0.2" in supervised[0].command


@pytest.mark.parametrize("mutual", [False, True])
def test_tls(supervised, command, tmp_path, mutual):
    files = [tmp_path / name for name in ("cert", "key", "ca")]
    for file in files:
        file.touch()
    cli.main([*command, "--grpc-tls-cert", str(files[0]), "--grpc-tls-key", str(files[1])]
             + (["--grpc-tls-client-ca", str(files[2])] if mutual else []))  # fmt: skip
    options = set(supervised[0].command)
    assert {"--grpc-use-ssl=true", f"--grpc-server-cert={files[0]}", f"--grpc-server-key={files[1]}"} <= options
    assert ({"--grpc-use-ssl-mutual=true", f"--grpc-root-cert={files[2]}"} <= options) is mutual


@pytest.mark.parametrize("option", ["cert", "key", "client-ca"])
def test_half_a_certificate(supervised, command, tmp_path, capsys, option):
    (tmp_path / "pem").touch()
    assert cli.main([*command, f"--grpc-tls-{option}", str(tmp_path / "pem")]) == 2
    assert "got None; allowed: a PEM file: certificate and key belong together" in capsys.readouterr().err


def test_port_in_use(supervised, command, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(command[5])))
        other.listen()
        assert cli.main(command) == 2
    assert f"--grpc-port: got {command[5]}; allowed: a port that can be had on 127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize(("most_files", "warned"), [(1023, True), (1024, False)])
def test_few_files(supervised, command, caplog, monkeypatch, most_files, warned):
    monkeypatch.setattr(serve.resource, "getrlimit", lambda _: (256, most_files))
    assert cli.main(command) == 5
    assert (f"only {most_files} files may be open (ulimit -H -n)" in caplog.text) == warned


def test_one_port_twice(supervised, command, capsys):
    command[7] = command[3]
    assert cli.main(command) == 2
    assert f"--metrics-port: got {command[3]}; allowed: a port that no other option" in capsys.readouterr().err


def test_serve_no_repository(supervised, tmp_path, capsys):
    assert cli.main(["serve", str(tmp_path)]) == 2
    assert "repository: got" in capsys.readouterr().err and not supervised


def test_wrong_configuration(supervised, command, repository, capsys):
    (repository / "engine.json").write_text('{"model": "m", "block_size": 0}')
    assert cli.main(command) == 2
    assert "block_size: got 0" in capsys.readouterr().err and not supervised


def test_sequence_id_as_control_input(supervised, command, repository, capsys):
    """Such a server can be crashed by a long text as sequence id; a comment does no harm."""
    (repository / "main").mkdir()
    config = repository / "main" / "config.pbtxt"
    config.write_text("# no CONTROL_SEQUENCE_CORRID\n")
    assert cli.main(command) == 5
    config.write_text('control_input [ { name: "C" control [ { kind: CONTROL_SEQUENCE_CORRID } ] } ]')
    assert cli.main(command) == 2
    assert f"{config}: got 'CONTROL_SEQUENCE_CORRID'; allowed: no control input" in capsys.readouterr().err


def test_server_missing(monkeypatch, command, capsys):
    monkeypatch.setattr(
        tritonserver, "install", lambda directory: (_ for _ in ()).throw(MtpError("no Triton server: …"))
    )
    assert cli.main(command) == 1
    assert capsys.readouterr().err == "mtp: no Triton server: …\n"


def test_install_server(supervised, tmp_path, capsys):
    assert cli.main(["install-server", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/tritonserver\n"

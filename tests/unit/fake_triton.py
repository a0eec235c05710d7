"""Stands in for tritonserver under a supervisor: answers on HTTP, has one process below it, and misbehaves as told.

Arguments: HTTP port, folder. The file `start` in it lists what each start does, a word a line: `serve` (also when
there are no more lines), `fail`, `crash`, `refuse` (requests), `slow` (the first), `stay` (after SIGTERM), `busy` (and
stay), `hang` (an engine below it that shows no life), `stop` (the process below it shows life once and is stopped),
`lose` (the process below it, at the first request).
"""

import mmap
import os
import signal
import subprocess
import sys
import time
import uuid
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

port, folder = int(sys.argv[1]), Path(sys.argv[2])
starts = (folder / "start").read_text().split()
behaviour, rest = (starts or ["serve"])[0], starts[1:]
(folder / "start").write_text("\n".join(rest))
with open(folder / "log", "a") as log:
    log.write(f"{behaviour} {os.environ['MTP_OWNER_PID']}\n")
if behaviour == "fail":
    sys.exit(7)
if behaviour == "crash":
    os.kill(os.getpid(), signal.SIGABRT)
ENGINE = """
import os, sys, time
from pathlib import Path
from mtp_backend.serving.rendezvous import Rendezvous
engine = Rendezvous.of_server(int(os.environ["MTP_OWNER_PID"]), Path(sys.argv[1]) / "engine.json")
engine.directory.mkdir()
engine.announce()
os.utime(engine.directory / "engine.pid", (0, 0))
print("announced", flush=True)
time.sleep(600)
"""
STOPPED = """
import os, signal, sys
from pathlib import Path
from mtp_backend.serving.rendezvous import Rendezvous
place = Rendezvous.of_server(int(os.environ["MTP_OWNER_PID"]), Path(sys.argv[1]) / "engine.json")
place.directory.mkdir(exist_ok=True)
place.show_role_life()
print("shown", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
programs = {"hang": ENGINE, "stop": STOPPED}
program = programs.get(behaviour, "import time; time.sleep(600)")
stub = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE)
if behaviour in programs:
    stub.stdout.readline()  # the real server is not ready before its engine
name = f"triton_mtp_backend_shm_region_{uuid.uuid4()}"
region = open(folder / "shm" / name, "w+b")
region.write(b"0")
region.flush()
memory = mmap.mmap(region.fileno(), 1)
(folder / "pids").write_text(f"{os.getpid()} {stub.pid}")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        running = int(behaviour == "busy")
        text = f'# HELP mtp\nmtp_num_sequences_running{{a="b"}} {running}\nmtp_num_sequences_waiting{{a="b"}} 0\n'
        self.answer(200, text + 'other{a="b",c="d"} 7\nmtp_generation_tokens_total{a="b"} 5\n')

    def do_POST(self):
        (folder / "asked").open("a").write(f"{self.path}\n")
        if behaviour == "lose":
            stub.kill()
            stub.wait()
            time.sleep(600)
        passing = [(500, "Stub process 'main_0_0' is not healthy."), (503, "later"), (400, "UNAVAILABLE: no engine")]
        failures = {"refuse": [(400, "no such thing")] * 9, "slow": passing}.get(behaviour, [])
        number = len((folder / "asked").read_text().splitlines()) - 1
        self.answer(*(failures[number] if number < len(failures) else (200, "{}")))

    def answer(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def end(*_):
    stub.kill()
    os._exit(0)


signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour in ("stay", "busy") else end)
HTTPServer(("127.0.0.1", port), Handler).serve_forever()

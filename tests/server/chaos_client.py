"""A client process for test_chaos: does one thing after the other, most of them not to their end, until it is killed.

python -m server.chaos_client HTTP_URL GRPC_URL CASES IDLE SEED: CASES is a JSON file of requests and what each gives
alone, IDLE the seconds after which the server may forget a sequence. It writes a line for each thing done. What it was
told wrongly, or an error, ends it.
"""

import json
import random
import sys
import time
from contextlib import closing
from types import SimpleNamespace

import httpx
from tritonclient.utils import InferenceServerException

from server.helpers import Connection, Refusal, events, generate, text, tokens

GIVEN_UP_SECONDS = 0.02


class Forgotten(Exception):
    """A sequence was idle for too long, as it can be on a machine that is far too busy."""


class Chaos:
    """One client; `seed` names its sequences too."""

    def __init__(self, server, connection, cases, idle, seed):
        self._server, self._connection, self._cases, self._idle = server, connection, cases, idle
        self._seed, self._rng = seed, random.Random(seed)
        self._num_sequences = 0

    def act(self):
        """Does one thing with one of the requests, and returns its name."""
        do = self._rng.choice(
            [self.stream, self.answer, self.cancel, self.disconnect, self.sequence]
            + [self.end_early, self.abandon, self.give_up]
        )
        try:
            do(self._rng.choice(self._cases))
        except Forgotten:
            return "forgotten"
        return do.__name__

    def pause(self):
        """Seconds until the next thing: many clients leave the server most of a small machine."""
        return self._rng.uniform(0, 2)

    def stream(self, case):
        """A stream to its end; some of the requests stop at a text."""
        self._check(case, list(self._open(case)), whole=True)

    def answer(self, case):
        """An answer over HTTP."""
        response = generate(self._server, **self._body(case))
        assert response.is_success, response.text
        self._check(case, [response.json()], whole=True)

    def cancel(self, case):
        """A stream that is cancelled."""
        answers = []
        with closing(self._open(case)) as stream:
            for _ in range(self._rng.randint(0, 4)):
                answers += [next(stream)] if not answers or not answers[-1]["finish_reason"] else []
        self._check(case, answers)

    def disconnect(self, case):
        """A stream over HTTP whose connection is closed."""
        url = f"http://{self._server.http_url}/v2/models/generate/generate_stream"
        body = self._body(case) | {"stream": True}
        with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as response:
            content = response.iter_raw()
            received = b"".join(part for part, _ in zip(content, range(self._rng.randint(1, 4)), strict=False))
        self._check(case, events(SimpleNamespace(text=received.decode(errors="ignore").rpartition("\n\n")[0])))

    def sequence(self, case):
        """A sequence to its end."""
        name, steps = self._stepped(case, case["params"]["max_tokens"])
        self._go_on(name, end=True, step=-1)
        self._check(case, steps, whole=True)

    def end_early(self, case):
        """A sequence that is ended between two steps."""
        name, steps = self._stepped(case, self._rng.randint(0, 8))
        self._go_on(name, end=True, step=-1)
        self._check(case, steps)

    def abandon(self, case):
        """A sequence that its client never ends."""
        self._check(case, self._stepped(case, self._rng.randint(0, 8))[1])

    def give_up(self, case):
        """A step that its client does not wait for; the sequence then starts again, or it is abandoned."""
        name = self._name()
        start = {"start": True, "text_input": case["prompt"], "sampling_parameters": case["params"]}
        try:
            self._check(case, [self._connection.step(name, client_timeout=GIVEN_UP_SECONDS, **start)])
        except InferenceServerException as error:
            assert Refusal.of(error).code == "DEADLINE_EXCEEDED", error
        if self._rng.random() < 0.5:
            self._check(case, [self._connection.step(name, end=True, **start)])

    def _name(self):
        self._num_sequences += 1
        return f"chaos {self._seed} {self._num_sequences}"

    def _stepped(self, case, most):
        """The name of a sequence and its steps, so many behind the first at most."""
        name = self._name()
        steps = [self._connection.step(name, start=True, text_input=case["prompt"], sampling_parameters=case["params"])]
        while len(steps) <= most and not steps[-1]["finish_reason"]:
            steps.append(self._go_on(name, step=len(steps)))
        return name, steps

    def _go_on(self, name, **options):
        asked = time.monotonic()
        try:
            return self._connection.step(name, **options)
        except InferenceServerException as error:
            told = Refusal.of(error).message
            if time.monotonic() - asked > self._idle and ("START flag" in told or "sequence lost" in told):
                raise Forgotten from None
            raise

    def _open(self, case):
        return self._connection.open_stream(text_input=case["prompt"], sampling_parameters=case["params"], stream=True)

    def _body(self, case):
        return {"text_input": case["prompt"], "sampling_parameters": json.dumps(case["params"])}

    def _check(self, case, answers, whole=False):
        """The answers are what the request gives alone, as far as they go."""
        for answer in answers:  # Triton writes a single value without its list
            if isinstance(answer["output_ids"], int):
                answer["output_ids"] = [answer["output_ids"]]
        ids, written = tokens(answers), text(answers)
        right = ids == case["token_ids"] and written == case["text"]
        begins = ids == case["token_ids"][: len(ids)] and case["text"].startswith(written)
        assert right if whole else begins, f"got {ids} {written!r}, alone {case}"


def main():
    http_url, grpc_url, cases, idle, seed = sys.argv[1:]
    server = SimpleNamespace(http_url=http_url, grpc_url=grpc_url)
    with open(cases) as file, Connection(server) as connection:
        chaos = Chaos(server, connection, json.load(file), int(idle), int(seed))
        while True:
            print(chaos.act(), flush=True)
            time.sleep(chaos.pause())


if __name__ == "__main__":
    main()

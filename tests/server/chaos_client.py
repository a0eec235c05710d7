"""A client process for test_chaos: does one thing after the other, most of them not to their end, until it is killed.

python -m server.chaos_client HTTP_URL GRPC_URL CASES SEED: CASES is a JSON file of requests and what each gives alone.
It writes a line for each thing done. What it was told wrongly, or an error, ends it.
"""

import json
import random
import sys
from contextlib import closing
from types import SimpleNamespace

import httpx
from tritonclient.utils import InferenceServerException

from server.helpers import Connection, Refusal, events, generate, text, tokens

GIVEN_UP_SECONDS = 0.02


class Chaos:
    """One client; `seed` names its sequences too."""

    def __init__(self, server, connection, cases, seed):
        self._server, self._connection, self._cases = server, connection, cases
        self._seed, self._rng = seed, random.Random(seed)
        self._num_sequences = 0

    def act(self):
        """Does one thing with one of the requests, and returns its name."""
        do = self._rng.choice(
            [self.stream, self.answer, self.cancel, self.disconnect, self.sequence]
            + [self.end_early, self.abandon, self.give_up]
        )
        do(self._rng.choice(self._cases))
        return do.__name__

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
        self._check(case, self._connection.run(self._name(), case["prompt"], case["params"]), whole=True)

    def end_early(self, case):
        """A sequence that is ended between two steps."""
        name, steps = self._started(case)
        self._connection.end(name)
        self._check(case, steps)

    def abandon(self, case):
        """A sequence that its client never ends."""
        self._check(case, self._started(case)[1])

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

    def _started(self, case):
        """A sequence after some steps."""
        name = self._name()
        steps = [self._connection.step(name, start=True, text_input=case["prompt"], sampling_parameters=case["params"])]
        for _ in range(self._rng.randint(0, 8)):
            if not steps[-1]["finish_reason"]:
                steps.append(self._connection.step(name, step=len(steps)))
        return name, steps

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
    http_url, grpc_url, cases, seed = sys.argv[1:]
    server = SimpleNamespace(http_url=http_url, grpc_url=grpc_url)
    with open(cases) as file, Connection(server) as connection:
        chaos = Chaos(server, connection, json.load(file), int(seed))
        while True:
            print(chaos.act(), flush=True)


if __name__ == "__main__":
    main()

"""Clients that do with a sequence what they may and what they may not, drawn from a seed."""

import random
import threading

import pytest
from tritonclient.utils import InferenceServerException

from server.helpers import NUM_DRAFTS, PROMPTS, Refusal

IGNORE = {"temperature": 0, "ignore_eos": True}
NUM_KNOWN = 9  # tokens that are generated at once


class Script:
    """A client that does what it may and what it may not with one sequence, and knows what the answers must be.

    The text that the server has is prompt, answers and what was appended; the next tokens are those that this text
    goes on with when it is generated alone.
    """

    def __init__(self, seed, going_on):
        self._rng = random.Random(seed)
        self._going_on = going_on
        self.name = f"script {seed}" if seed % 2 else seed + 1
        self._text = None  # None while the sequence is not live
        self._step = 0
        self._last = None

    def run(self, connection):
        self._start(connection)
        for _ in range(self._rng.randint(2, 8)):
            action = self._rng.choice([self._next] * 4 + [self._again, self._gap, self._append, self._drafts])
            action(connection)
            if self._rng.random() < 0.1:
                self._start(connection)
        if self._rng.random() < 0.95:
            connection.end(self.name)
            self._refused(connection, "START flag", step=self._step)

    def _start(self, connection):
        prompt = self._rng.choice(PROMPTS)
        self._text = self._going_on.ids(prompt)
        self._step = -1
        start = {"input_ids": self._text} if self._rng.random() < 0.5 else {"text_input": prompt}
        self._made(connection.step(self.name, start=True, sampling_parameters={"ignore_eos": True}, **start))

    def _next(self, connection, **tensors):
        number = {"step": self._step + 1} if self._rng.random() < 0.7 or not tensors else {}
        self._made(connection.step(self.name, **number, **tensors))

    def _made(self, answer):
        self._step += 1
        given = answer["output_ids"]
        assert given and given == self._going_on(self._text)[: len(given)]
        assert answer["current_step"] == self._step and answer["num_accepted"] == len(given) - 1 <= NUM_DRAFTS
        self._text = self._text + given
        assert answer["sequence_length"] == len(self._text)
        self._last = answer

    def _again(self, connection):
        assert connection.step(self.name, step=self._step) == self._last

    def _gap(self, connection):
        self._refused(connection, "step: got", step=self._rng.choice([self._step + 2, self._step + 100, -2]))

    def _append(self, connection):
        ids = self._rng.choice([[300], [300, 301, 302]])
        if self._rng.random() < 0.3:
            self._refused(connection, "input_ids", step=self._step + 1, input_ids=[*ids, 10**6])
        self._text = self._text + ids
        self._next(connection, input_ids=ids)
        assert self._last["num_accepted"] == 0

    def _drafts(self, connection):
        if self._rng.random() < 0.3:
            self._refused(connection, "draft_ids", step=self._step + 1, draft_ids=[5] * (NUM_DRAFTS + 1))
        right = self._going_on(self._text)[:NUM_DRAFTS]
        kept = self._rng.randint(0, NUM_DRAFTS)
        drafts = right[:kept] + [(token + 1) % 1000 for token in right[kept:]]
        self._next(connection, draft_ids=drafts)
        assert self._last["num_accepted"] == kept

    def _refused(self, connection, message, **tensors):
        with pytest.raises(InferenceServerException) as caught:
            connection.step(self.name, **tensors)
        error = Refusal.of(caught.value)
        assert error.invalid and message in error.message


class GoingOn:
    """What a text goes on with, alone and greedy: the next tokens behind it."""

    def __init__(self, llm, alone):
        self._encode = lambda text: llm.engine.tokenizer.encode(text).ids
        self._alone = alone
        self._known = {}
        self._lock = threading.Lock()

    def ids(self, text):
        return self._encode(text)

    def __call__(self, token_ids):
        with self._lock:
            if tuple(token_ids) not in self._known:
                new = self._alone(token_ids, max_tokens=NUM_KNOWN, **IGNORE).token_ids
                # What is alone goes on with its own tokens, so this tells about those texts too.
                for count in range(NUM_KNOWN - NUM_DRAFTS):
                    self._known[(*token_ids, *new[:count])] = new[count : count + NUM_DRAFTS + 1]
            return self._known[tuple(token_ids)]

"""Steps computed before they are asked for: clients get what an engine gives that waits for each request.

Clients with random habits share an engine behind `Sessions`; messages and device batches alternate at random, so that a
request finds its step waiting, computed, or not begun. Their steps are then made again one by one, without `Sessions`.
"""

import itertools
import random
from dataclasses import dataclass, field

import pytest
from mtp_backend import SamplingParams
from mtp_backend.engine.sequence import Status
from mtp_backend.serving.messages import Asked, Failed, Propose, Proposed, Step, Stepped
from mtp_backend.serving.sessions import Sessions

pytestmark = pytest.mark.slow
NUM_CLIENTS = 4
MAX_TOKENS = 24
MOST_APPENDED = 3  # the prompt is the first: each of them lets a client make its tokens anew


@dataclass
class Client:
    """One sequence: what it asked for and what it got.

    Attributes:
        requests: of each step the input, the drafts of its own (or None) and whether it is an END.
        steps: of each step the tokens, text, accepted drafts, length and finish reason.
        drafts: what it was offered after each step, but after an END.
    """

    name: str
    params: dict
    requests: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    drafts: list = field(default_factory=list)
    open: int | None = None  # the request that it waits for
    answer: Stepped | None = None
    ended: bool = False


class Play:
    """Clients before one table of sessions."""

    def __init__(self, engine, seed, prompts, params):
        self.engine, self.chance = engine, random.Random(seed)
        self.sessions = Sessions(engine, lambda address, message: self.sent.append(message), lambda: 0.0)
        self.sent, self.numbers = [], itertools.count()
        self.clients = [Client(f"{seed}-{i}", own) for i, own in zip(range(len(prompts)), params, strict=True)]
        self.prompts = prompts
        self.num_ahead = self.num_taken_back = 0  # requests that found their step running ahead

    def run(self):
        while not all(client.ended for client in self.clients):
            if self.engine.has_work and self.chance.random() < 0.5:
                self.batch()
            else:
                self.talk(self.chance.choice([client for client in self.clients if not client.ended]))
        assert not len(self.sessions)

    def batch(self):
        for output in self.engine.step():
            self.sessions.deliver(output)
        self.sessions.end_batch()
        self.read()

    def read(self):
        for message in self.sent:
            [client] = [client for client in self.clients if client.open == message.request]
            client.open = None
            assert not isinstance(message, Failed), message.message
            if isinstance(message, Proposed):
                client.drafts.append(message.draft_ids)
                continue
            if client.answer is not None and message.step == client.answer.step:
                assert fields(message)[1:] == fields(client.answer)[1:]  # a repeated one
                continue
            client.answer = message
            client.steps.append(
                (message.token_ids, message.text, message.num_accepted, message.sequence_length, message.finish_reason)
            )
            client.ended = client.requests[-1][2]
        self.sent.clear()

    def talk(self, client):
        """The client's next message, if it does not wait for an answer."""
        if client.open is not None:
            return
        number = next(self.numbers)
        if client.answer is not None and len(client.drafts) < len(client.steps):
            made = client.answer.next_draft_ids
            if made is not None:
                self.sessions.asked(Asked(client.name, client.answer.epoch))
                client.drafts.append(made)
                return
            client.open = number
            self.sessions.propose(b"", Propose(number, client.name, client.answer.epoch))
        elif client.answer is not None and self.chance.random() < 0.1:
            client.open = number
            self.sessions.step(b"", self.message(client, number, client.answer.step))
        else:
            client.open = number
            self.next_step(client, number)
        self.read()

    def message(self, client, number, step, tokens=None, drafts=None, end=False):
        start = client.answer is None
        return Step(number, client.name, start, end, tokens, drafts, step, client.params if start else None)

    def next_step(self, client, number):
        """Mostly goes on; sometimes the client appends tokens, brings drafts, or ends the sequence."""
        if client.answer is None:
            tokens, drafts, end = self.prompts[self.clients.index(client)], None, False
        else:
            over, kind = bool(client.answer.finish_reason), self.chance.random()
            end = kind < (0.3 if over else 0.02)
            may_append = sum(bool(tokens) for tokens, _, _ in client.requests) < MOST_APPENDED
            tokens = self.chance.choices(range(20, 900), k=3) if 0.9 < kind and may_append else None
            drafts = None
            if self.engine.num_drafts and (0.8 < kind < 0.95):
                drafts = self.chance.choice([client.drafts[-1][:1], [], self.chance.choices(range(20, 900), k=1)])
        client.requests.append((tokens, drafts, end))
        session = self.sessions._sessions.get(client.name)
        if session is not None and session.is_ahead:
            self.num_ahead += tokens is drafts is None
            self.num_taken_back += not tokens is drafts is None
        step = self.chance.choice([None, client.answer.step + 1]) if client.answer else None
        self.sessions.step(b"", self.message(client, number, step, tokens, drafts, end))


def fields(message):
    return [getattr(message, name) for name in message.__struct_fields__]


def one_by_one(engine, client):
    """The same steps of one client, each computed when it is asked for: steps and drafts as in `Client`."""
    steps, drafts, sequence, held_back = [], [], None, ""
    for tokens, own, end in client.requests:
        if sequence is None:
            sequence = engine.new_sequence(tokens, SamplingParams(**client.params), paced=True)
        elif tokens:
            held_back += sequence.text.take(final=True)
            engine.set_drafts(sequence, [])
            engine.append(sequence, tokens)
        if own is not None and not sequence.finish_reason:
            engine.set_drafts(sequence, own)
        committed, accepted = [], 0
        if not sequence.finish_reason:
            engine.add(sequence)
            while sequence.status is not Status.PAUSED:
                outputs = engine.step()
            [output] = outputs
            committed, accepted = output.token_ids, output.num_accepted
        text, held_back = held_back + sequence.text.take(final=bool(sequence.finish_reason)), ""
        steps.append((committed, text, accepted, len(sequence.token_ids), sequence.finish_reason))
        if not sequence.draft_ids and not sequence.finish_reason and not end:
            engine.request_drafts(sequence)
            engine.step()
        if not end:
            drafts.append(sequence.draft_ids)
    engine.remove(sequence)
    return steps, drafts


PARAMS = [
    {"max_tokens": MAX_TOKENS, "ignore_eos": True},
    {"max_tokens": MAX_TOKENS, "temperature": 0.8, "seed": 3, "stop": ["and the", "unto"]},
    {"max_tokens": MAX_TOKENS, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_tokens": 9, "stop": ["LORD"]},
    {"max_tokens": 25, "temperature": 1.0, "seed": 8, "structured_output": {"regex": "[a-z ]{5,60}"}},
]


@pytest.mark.parametrize("more", [0, 1])
def test_clients_get_what_they_get_one_by_one(model, more, make_llm, prompt_of):
    k = 2 * ("deepseek" in model) + more  # 2 and 3 with one model, 0 and 1 with the other
    engine = make_llm(model, k, block_size=8).engine
    waiting = make_llm(model, k, block_size=8, enable_prefix_caching=False).engine
    play = Play(engine, k, [prompt_of(5 + 9 * i, start=i) for i in range(NUM_CLIENTS)], PARAMS)
    play.run()
    for client in play.clients:
        steps, drafts = one_by_one(waiting, client)
        assert client.steps == steps
        assert client.drafts == drafts
    assert play.num_ahead > 5 and (play.num_taken_back or not k)


THINKING = {
    "rejection_sample_method": "lossy_relaxed",
    "begin_thinking_phase_token": 20,
    "end_thinking_phase_token": 21,
}


@pytest.mark.parametrize(
    "options",
    [{}, {"use_mtp_vanilla": True}, {"rejection_sample_method": "block"}, THINKING],
    ids=["eagle", "vanilla", "block", "relaxed"],
)
def test_taking_back_a_step(deepseek, make_llm, prompt_of, options):
    """The sequence is then as one that has not made that step, and goes on like it."""
    engine = make_llm(deepseek, 2, block_size=8, **options).engine
    params = SamplingParams(temperature=0.9, seed=4, ignore_eos=True, stop=("zebra",), frequency_penalty=0.5)
    ahead, wanted = (engine.new_sequence([20, *prompt_of(12)], params, paced=True) for _ in range(2))
    for sequence in (ahead, wanted):
        step(engine, sequence)
        engine.append(sequence, [300, 301])
        for _ in range(4):
            step(engine, sequence)
            sequence.text.take(final=False)
    length, drafts = len(ahead.token_ids), (ahead.draft_ids, ahead.draft_probs)
    assert engine.run_ahead(ahead)
    engine.step()
    assert len(ahead.token_ids) > length and ahead.num_computed > length - 1
    engine.take_back(ahead, length)
    assert ahead.num_computed == 0
    ahead.draft_ids, ahead.draft_probs = drafts
    for _ in range(4):
        for name in ("token_ids", "draft_ids", "num_generated", "finish_reason", "thinking", "status"):
            assert getattr(ahead, name) == getattr(wanted, name), name
        assert ahead.text.value == wanted.text.value
        assert ahead.text.take(final=False) == wanted.text.take(final=False)
        assert step(engine, ahead) == step(engine, wanted)
    for sequence in (ahead, wanted):
        engine.remove(sequence)


def step(engine, sequence):
    """One step with the drafts of the next: its tokens and the number of accepted drafts."""
    sequence.wants_drafts = True
    engine.add(sequence)
    [output] = engine.step()
    return output.token_ids, output.num_accepted


def test_taking_back_a_step_that_has_not_begun(deepseek, make_llm, prompt_of):
    engine = make_llm(deepseek, 2, block_size=8).engine
    sequence = engine.new_sequence(prompt_of(12), SamplingParams(ignore_eos=True), paced=True)
    step(engine, sequence)
    before = (list(sequence.token_ids), sequence.num_computed, list(sequence.draft_ids))
    assert engine.run_ahead(sequence) and engine.has_work
    engine.take_back(sequence, len(sequence.token_ids))
    assert not engine.has_work
    assert (sequence.token_ids, sequence.num_computed, sequence.draft_ids) == before
    engine.remove(sequence)


def test_no_step_ahead_without_room(deepseek, make_llm, prompt_of, tight_pool):
    """The other sequence keeps its blocks."""
    small = tight_pool(deepseek, 2, 8, 8)
    engine = make_llm(deepseek, 2, block_size=8, max_model_len=64, kv_cache_bytes=small).engine
    params = SamplingParams(ignore_eos=True)
    sequences = [engine.new_sequence(prompt_of(28, start), params, paced=True) for start in (0, 9)]
    for sequence in sequences:
        step(engine, sequence)
    assert engine.pool.num_free == 0 and all(sequence.num_computed for sequence in sequences)
    while engine.run_ahead(sequences[0]):
        engine.step()
    assert len(sequences[0].block_table) == len(sequences[1].block_table) == 4
    assert all(sequence.num_computed for sequence in sequences)
    for sequence in sequences:
        engine.remove(sequence)

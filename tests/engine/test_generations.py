"""Generate requests over an engine: bound of the queue, priorities, deadlines, roles that do not take their answers."""

import itertools
from dataclasses import replace

import pytest
from mtp_backend import SamplingParams
from mtp_backend.serving.generations import Generations
from mtp_backend.serving.messages import Failed, Generate, Generated, Step
from mtp_backend.serving.request_times import Work
from mtp_backend.serving.sessions import Sessions

ROLE = b"role"
PARAMS = {"max_tokens": 12, "ignore_eos": True}


class Server:
    """The loop of the engine process without its socket."""

    def __init__(self, engine):
        self.engine, self.now, self.behind = engine, 0.0, False
        self.sent, self.outcomes = [], []
        self.generations = Generations(
            engine, self._send, lambda address: self.behind, self.outcomes.append, lambda: self.now
        )
        self.numbers = itertools.count(1)

    def _send(self, address, message):
        assert address == ROLE
        self.sent.append(message)

    def ask(self, prompt, stream=False, **options):
        number = next(self.numbers)
        self.generations.start(ROLE, Generate(number, prompt, PARAMS, stream, **options))
        return number

    def step(self):
        self.now += 1.0
        self.generations.expire()
        before = Work.of(self.engine.totals)
        outputs = self.engine.step()
        self.generations.stepped(self.now, before)
        for output in outputs:
            self.generations.deliver(output)

    def run(self):
        while self.engine.has_work:
            self.step()

    def answers(self, number):
        return [message for message in self.sent if message.request == number]


@pytest.fixture
def serve(make_llm, deepseek):
    """serve(**options): a `Server` whose engine has these options."""

    def make(k=1, **options):
        engine = make_llm(deepseek, k).engine
        engine.config = replace(engine.config, **options)
        return Server(engine)

    return make


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_the_queue_is_bounded(serve, limit, prompt_of):
    """As many as run at once, and so many behind them; the refusal names both numbers."""
    server = serve(max_queue_size=limit)
    numbers = [server.ask(prompt_of(5, start)) for start in range(8 + limit + 2)]
    for number in numbers[-2:]:
        [answer] = server.answers(number)
        assert (answer.code, answer.message) == (
            "UNAVAILABLE",
            f"{limit} requests are waiting of at most {limit} (max_queue_size); try again later",
        )
    server.run()
    assert all(server.answers(number)[-1].finish_reason == "length" for number in numbers[:-2])


def test_priorities(make_llm, deepseek, prompt_of):
    server = Server(make_llm(deepseek, 1, max_num_seqs=1).engine)
    running = server.ask(prompt_of(5), priority=9)
    server.step()
    waiting = [server.ask(prompt_of(5), priority=priority) for priority in (2, 0, -1, 2, 0)]
    server.run()
    finished = [message.request for message in server.sent]
    assert finished == [running, waiting[2], waiting[1], waiting[4], waiting[0], waiting[3]]


def test_deadlines(serve, prompt_of, greedy, deepseek):
    """In the queue and while running; what others get is not touched, and the blocks are free."""
    server = serve(k=0)
    others = [server.ask(prompt_of(5, start)) for start in range(7)]
    running = server.ask(prompt_of(9), stream=True, timeout=5.0)
    queued = server.ask(prompt_of(9), timeout=4.0)
    relaxed = server.ask(prompt_of(9), timeout=1000.0)
    server.run()
    *chunks, last = server.answers(running)
    assert [chunk.token_ids[0] for chunk in chunks] == greedy(deepseek, prompt_of(9), 12)[:4]
    assert (last.code, last.message) == ("DEADLINE_EXCEEDED", "5 s (timeout) have passed; 4 tokens were generated")
    [answer] = server.answers(queued)
    assert (answer.code, answer.message) == ("DEADLINE_EXCEEDED", "4 s (timeout) have passed; 0 tokens were generated")
    for number in (*others, relaxed):
        assert server.answers(number)[-1].finish_reason == "length"
    assert [outcome.finish_reason for outcome in server.outcomes].count("error") == 2
    assert server.engine.pool.num_free == server.engine.pool.num_blocks


@pytest.mark.parametrize("k", [0, 3])
def test_a_role_that_takes_nothing_gets_nothing_more(serve, k, prompt_of, greedy, deepseek):
    """Its streams wait, and then get in one answer what came meanwhile; nothing is lost or doubled."""
    server = serve(k)
    number = server.ask(prompt_of(9), stream=True)
    server.step()
    before = len(server.sent)
    assert before == 1
    server.behind = True
    for _ in range(2):
        server.step()
    assert len(server.sent) == before
    server.behind = False
    server.step()
    assert len(server.sent) == before + 1 and len(server.sent[-1].token_ids) >= 3
    server.behind = True
    server.run()
    assert len(server.sent) == before + 2 and server.sent[-1].final, "the last answer is always sent"
    answers = server.answers(number)
    assert [token for answer in answers for token in answer.token_ids] == greedy(deepseek, prompt_of(9), 12)
    offsets = [offset for answer in answers for offset in answer.text_offsets]
    assert offsets == sorted(offsets) and len(offsets) == 12


def test_cancelled_and_dropped(serve, prompt_of):
    server = serve()
    numbers = [server.ask(prompt_of(9), timeout=100.0) for _ in range(3)]
    server.step()
    assert server.generations.cancel(ROLE, numbers[0]) and not server.generations.cancel(ROLE, numbers[0])
    assert server.answers(numbers[0])[-1].code == "CANCELLED"
    server.generations.drop(ROLE)
    assert not server.engine.has_work and server.engine.pool.num_free == server.engine.pool.num_blocks
    assert [outcome.finish_reason for outcome in server.outcomes] == ["cancelled"] * 3


def test_cached_tokens_of_a_request(serve, prompt_of):
    server = serve()
    numbers = []
    for _ in range(2):
        numbers.append(server.ask(prompt_of(40, start=3)))
        server.run()
    answers = [server.answers(number)[-1] for number in numbers]
    assert all(isinstance(answer, Generated) and answer.num_input_tokens == 40 for answer in answers)
    assert answers[1].num_cached_tokens == 32 >= answers[0].num_cached_tokens


def test_text_that_was_held_back_comes_before_that_of_the_next_turn(make_llm, deepseek, prompt_of):
    """It might have become a stop string; the client's tokens behind it make it certain."""
    engine, sent = make_llm(deepseek, 2).engine, []
    sessions = Sessions(engine, lambda address, message: sent.append(message), lambda: 0.0)

    def step(number, **fields):
        given = {"start": False, "end": False, "token_ids": None, "draft_ids": None, "params": None} | fields
        sessions.step(ROLE, Step(request=number, sequence="s", step=number, **given))
        while engine.has_work:
            for output in engine.step():
                sessions.deliver(output)
        assert not isinstance(sent[-1], Failed), sent[-1]
        return sent[-1]

    plain = engine.new_sequence(prompt_of(9), SamplingParams(max_tokens=1), paced=True)
    engine.add(plain)
    engine.step()
    first = plain.text.value
    engine.remove(plain)
    assert len(first) > 1
    params = {"stop": [first[-1] + "\u2603"], "ignore_eos": True, "max_tokens": 4}
    assert step(0, start=True, token_ids=prompt_of(9), params=params).text == first[:-1]
    answer = step(1, token_ids=prompt_of(3))
    assert answer.text.startswith(first[-1]) and len(answer.token_ids) == 1
    shown = engine.tokenizer.decode(answer.token_ids)
    assert answer.text in (first[-1] + shown, first[-1] + shown.removesuffix(first[-1]))
    later = step(2, end=True)
    shown = engine.tokenizer.decode(answer.token_ids + later.token_ids)
    assert answer.text + later.text in (first[-1] + shown, first[-1] + shown.removesuffix(first[-1]))  # once

"""An engine that only counts, and the table of client-paced sequences over it."""

import itertools
from types import SimpleNamespace

from mtp_backend.engine.engine import StepOutput
from mtp_backend.engine.sequence import Sequence, Status
from mtp_backend.errors import InvalidArgument
from mtp_backend.serving.messages import Asked, Failed, Propose, Step
from mtp_backend.serving.sessions import Sessions

MAIN, DRAFT, OTHER = b"main", b"draft", b"other"
TTL = 10.0


class FakeEngine:
    """Each step emits one token and accepts all drafts, each draft pass proposes two; only when `step` is called."""

    def __init__(self, max_sequences):
        self.config = SimpleNamespace(max_sequences=max_sequences, sequence_ttl_seconds=TTL, num_drafts=2)
        self.tokenizer = None
        self.tokens = itertools.count(100)
        self.waiting, self.drafting, self.removed, self.taken_back = [], [], [], []
        self.full = False  # takes no steps ahead
        self.made = [7, 8]

    def new_sequence(self, prompt_ids, params, *, paced, with_text):
        assert paced and not with_text
        if not prompt_ids:
            raise InvalidArgument("input_ids", "0 tokens", "1 … 9 tokens")
        return Sequence(list(prompt_ids), len(prompt_ids), params, paced=True)

    def restore(self, sequence, generated_ids):
        sequence.token_ids += generated_ids

    def add(self, sequence):
        sequence.status = Status.WAITING
        self.waiting.append(sequence)

    def remove(self, sequence):
        assert sequence.status is not Status.FINISHED
        sequence.status = Status.FINISHED
        self.waiting = [one for one in self.waiting if one is not sequence]
        self.removed.append(sequence)

    def append(self, sequence, token_ids):
        if max(token_ids) > 999:
            raise InvalidArgument("input_ids", max(token_ids), "token ids 0 … 999")
        sequence.token_ids += token_ids
        sequence.draft_ids = []
        sequence.finish_reason = ""

    def set_drafts(self, sequence, draft_ids):
        if len(draft_ids) > 2:
            raise InvalidArgument("draft_ids", f"{len(draft_ids)} tokens", "0 … 2 tokens")
        sequence.draft_ids = draft_ids

    def run_ahead(self, sequence):
        assert sequence.status is Status.PAUSED
        if self.full:
            return False
        self.add(sequence)
        return True

    def take_back(self, sequence, num_tokens):
        self.waiting = [one for one in self.waiting if one is not sequence]
        self.taken_back.append((sequence, len(sequence.token_ids) - num_tokens))
        sequence.status = Status.PAUSED
        del sequence.token_ids[num_tokens:]
        sequence.draft_ids = []

    def request_drafts(self, sequence):
        self.drafting.append(sequence)

    def step(self):
        outputs = []
        for sequence in self.waiting:
            token = next(self.tokens)
            accepted = len(sequence.draft_ids)
            sequence.token_ids += [*sequence.draft_ids, token]
            outputs.append(StepOutput(sequence, [*sequence.draft_ids, token], accepted))
            sequence.draft_ids = list(self.made) if sequence.wants_drafts else []
            sequence.status = Status.PAUSED
        for sequence in self.drafting:
            sequence.draft_ids = list(self.made)
        self.waiting, self.drafting = [], []
        return outputs


class Table:
    """Sessions with a fake engine, a fake clock and an outbox."""

    def __init__(self, max_sequences=4):
        self.engine = FakeEngine(max_sequences)
        self.now = 0.0
        self.sent = []
        self.sessions = Sessions(
            self.engine, lambda address, message: self.sent.append((address, message)), lambda: self.now
        )
        self.numbers = itertools.count(1)

    def ask(
        self,
        sequence="s",
        step=None,
        *,
        start=False,
        end=False,
        token_ids=None,
        draft_ids=None,
        params=None,
        address=MAIN,
        **options,
    ):
        """Asks for a step; returns the request's number."""
        number = next(self.numbers)
        token_ids = [1, 2, 3] if start and token_ids is None else token_ids
        self.sessions.step(address, Step(number, sequence, start, end, token_ids, draft_ids, step, params, **options))
        return number

    def propose(self, sequence="s", epoch=1, address=DRAFT):
        number = next(self.numbers)
        self.sessions.propose(address, Propose(number, sequence, epoch))
        return number

    def take_drafts(self, sequence="s", epoch=1):
        """The client takes the drafts that came with its step."""
        self.sessions.asked(Asked(sequence, epoch))

    def run(self):
        for output in self.engine.step():
            self.sessions.deliver(output)
        self.sessions.end_batch()

    def answers(self, number, address=MAIN):
        return [message for to, message in self.sent if (to, message.request) == (address, number)]

    def answer(self, number, address=MAIN):
        [message] = self.answers(number, address)
        return message

    def step(self, *args, **options):
        """A step from question to answer."""
        number = self.ask(*args, **options)
        self.run()
        return self.answer(number, options.get("address", MAIN))

    def refused(self, number, code, *parts, address=MAIN):
        message = self.answer(number, address)
        assert isinstance(message, Failed) and message.code == code, message
        assert all(part in message.message for part in parts), message.message

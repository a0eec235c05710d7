"""Triton's way of handing requests to the models of `speculative`, in simulated time, in front of real `Sessions`.

Each model is one process that is given a batch of requests at a time and none before all of it is answered. The engine
takes messages between its batches only. All times are in seconds.
"""

import heapq
import itertools

from fake_engine import FakeEngine
from mtp_backend.serving.gathering import Gathering
from mtp_backend.serving.messages import Asked, Propose, Step
from mtp_backend.serving.sessions import Sessions

HOP = 0.00015  # of a message between processes
READ = 0.00006  # a model's work on a request, and again on its answer
CORE = 0.00015  # the server's work on a request of a model, one after the other
CLIENT = 0.00025  # the clients' work on an answer, one after the other
MAX_BATCH = 16


class Model:
    """A model's queue and the batch that its process holds: request → client, until all are answered."""

    def __init__(self):
        self.queue, self.open, self.answers = [], {}, []
        self.busy = False


class SimulatedServer:
    """Clients that ask for step after step.

    Args:
        batch_seconds: time of a device batch of so many sequences.

    Attributes:
        batches: sizes of the device batches so far.
        step_seconds: how long each step took its client.
    """

    def __init__(self, num_clients, batch_seconds):
        self.now = 0.0
        self.batches, self.step_seconds = [], []
        self._events, self._order = [], itertools.count()
        self._batch_seconds = batch_seconds
        self._engine = FakeEngine(num_clients)
        self._sessions = Sessions(self._engine, lambda *sent: self._outbox.append(sent), lambda: self.now)
        self._gathering = Gathering(lambda: self.now)
        self._stepping = False
        self._inbox, self._outbox = [], []
        self._models = {"main": Model(), "draft": Model()}
        self._core = self._clients = 0.0  # when each is free again
        self._numbers = itertools.count()
        self._asked_at = {}
        self._answer = {}  # client → main's last answer
        for client in range(num_clients):
            self._at(0.0003 * client, self._ask, client)

    def run(self, seconds):
        """Lets so much time pass."""
        end = self.now + seconds
        while self._events[0][0] < end:
            self.now, _, function, arguments = heapq.heappop(self._events)
            function(*arguments)

    def _at(self, time, function, *arguments):
        heapq.heappush(self._events, (time, next(self._order), function, arguments))

    def _ask(self, client):
        self._asked_at[client] = self.now
        self._pass_on("main", client)

    def _pass_on(self, name, client):
        self._core = max(self._core, self.now) + CORE
        self._at(self._core, self._queue, name, client)

    def _queue(self, name, client):
        self._models[name].queue.append(client)
        self._execute(name)

    def _execute(self, name):
        model = self._models[name]
        if model.busy or not model.queue:
            return
        batch, model.queue = model.queue[:MAX_BATCH], model.queue[MAX_BATCH:]
        model.busy, model.answers = True, batch
        messages = []
        for client in batch:
            number, last = next(self._numbers), self._answer.get(client)
            if name == "main":
                step = last.step + 1 if last else 0
                messages.append(Step(number, client, not step, False, None if step else [1], None, step, None))
            elif last.next_draft_ids is None:
                messages.append(Propose(number, client, last.epoch))
            else:
                messages.append(Asked(client, last.epoch))
                continue
            model.open[number] = client
        read = self.now + READ * len(batch)
        self._at(read + HOP, self._receive, name, messages)
        if not model.open:
            self._at(read, self._finish, name)

    def _receive(self, name, messages):
        self._inbox += [(name, message) for message in messages]
        self._loop()

    def _loop(self):
        """What the engine's process does between its batches."""
        if self._stepping:
            return
        for name, message in self._inbox:
            match message:
                case Step():
                    self._sessions.step(name, message)
                case Propose():
                    self._sessions.propose(name, message)
                case Asked():
                    self._sessions.asked(message)
        self._inbox = []
        if self._engine.waiting or self._engine.drafting:
            left = self._gathering.seconds_left(self._sessions.expects_more)
            if left:
                self._at(self.now + left, self._loop)
            else:
                self._stepping = True
                taken = self._batch_seconds(len(self._engine.waiting))
                self._at(self.now + taken, self._stepped, taken)
        self._flush()

    def _stepped(self, seconds):
        self._stepping = False
        if self._engine.waiting:
            self.batches.append(len(self._engine.waiting))
        for output in self._engine.step():
            self._sessions.deliver(output)
        self._sessions.end_batch()
        self._gathering.stepped(seconds)
        self._flush()
        self._loop()

    def _flush(self):
        self._at(self.now + HOP, self._answered, self._outbox)
        self._outbox = []

    def _answered(self, sent):
        for name, message in sent:
            client = self._models[name].open.pop(message.request)
            if name == "main":
                self._answer[client] = message
        for name in {name for name, _ in sent}:
            if not self._models[name].open:
                self._at(self.now + READ * len(self._models[name].answers), self._finish, name)

    def _finish(self, name):
        """A model's process returns the answers of its batch, and gets the next one."""
        model = self._models[name]
        answered, model.busy = model.answers, False
        self._execute(name)
        for client in answered:
            if name == "main":
                self._pass_on("draft", client)
            else:
                self._core = max(self._core, self.now) + CORE
                self._clients = max(self._clients, self._core) + CLIENT
                self._at(self._clients, self._got, client)

    def _got(self, client):
        self.step_seconds.append(self.now - self._asked_at[client])
        self._ask(client)

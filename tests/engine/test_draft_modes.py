"""Draft modes: MTP Eagle and Vanilla, what is carried, and the mask of position 0."""

import json
import random
from itertools import combinations, product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from mtp_backend import SamplingParams
from mtp_backend.config import SpeculativeConfig
from mtp_backend.engine.sequence import Status
from mtp_backend.graphs import Rows
from mtp_backend.speculation import DraftWork
from reference.checkpoints import (
    DEMO,
    edit_tensors,
    greedy,
    save_random,
    save_with_mtp_layers,
    transformers_model,
)
from reference.mtp import MtpReference, vanilla_chain
from reference.paged import Paged, propose
from transformers.generation.candidate_generator import MTPCandidateGenerator

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
NOISE = 0.1  # enough that the order of the layers matters, little enough that drafts are accepted
MODES = [
    pytest.param({"use_mtp_vanilla": vanilla, "mtp_carry": carry, "mask_pos0": mask}, id=f"{name}-{carry}{suffix}")
    for (vanilla, name), carry, (mask, suffix) in product(
        [(False, "eagle"), (True, "vanilla")], ["normed", "raw"], [(False, ""), (True, "-mask")]
    )
]


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory):
    """random_checkpoint(model_type): three MTP layers, each with an embedding and a head of its own."""
    made = {}

    def make(model_type):
        if model_type not in made:
            made[model_type] = save_random(tmp_path_factory.mktemp(model_type), model_type, num_mtp=3)
        return made[model_type]

    return make


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """several(name, count): a demo checkpoint with that many MTP layers, which differ a little."""
    made = {}

    def make(name, count):
        if (name, count) not in made:
            folder = tmp_path_factory.mktemp(f"{name}-{count}")
            made[name, count] = str(save_with_mtp_layers(folder, DEMO[name], count, NOISE))
        return made[name, count]

    return make


def references(directory, count, mode):
    options = {"carry": mode.get("mtp_carry", "normed"), "mask_pos0": mode.get("mask_pos0", False)}
    return [MtpReference(directory, index, **options) for index in range(count)]


def chain(modules, mode, tokens, hidden, count):
    """The drafts of a text by the plain reference, and their logits."""
    if mode["use_mtp_vanilla"]:
        return vanilla_chain(modules, tokens, hidden, count)
    return modules[0].chain(tokens, hidden, count)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("model_type", "k"), [("deepseek_v3", 5), ("glm4_moe", 3), ("glm4_moe_lite", 2)])
def test_drafts_and_their_logits(random_checkpoint, model_type, k, mode):
    """Ragged passes over texts that go on by a random number of tokens, some of them drafts of the pass before."""
    directory = random_checkpoint(model_type)
    modules = references(directory, 3, mode)
    paged = Paged(directory, speculative=SpeculativeConfig(k, **mode))
    vocabulary, width = modules[0].config["vocab_size"], modules[0].config["hidden_size"]
    chance, generator = random.Random(k), torch.Generator().manual_seed(k)
    texts = [[chance.randrange(vocabulary)] for _ in range(5)]
    hidden = [torch.empty(0, width) for _ in texts]
    tables, kept, drafts = [paged.new_table(60) for _ in texts], [{} for _ in texts], [[] for _ in texts]
    for _ in range(6):
        indices = [index for index in range(len(texts)) if chance.random() < 0.8]
        work = []
        for index in indices:
            start = len(texts[index]) - 1
            accepted = drafts[index][: chance.randint(0, k)]
            texts[index] += accepted + [chance.randrange(vocabulary) for _ in range(chance.choice((1, 1, 4)))]
            rows = torch.randn(len(texts[index]) - 1 - start, width, generator=generator)
            hidden[index] = torch.cat([hidden[index], rows])
            wanted = chance.choice((0, 1, k, k))
            given = texts[index][start + 1 :], Rows(rows).all, start, tables[index]
            work.append(DraftWork(*given, wanted, kept=kept[index]))
        for index, item, (own, logits) in zip(indices, work, propose(paged, work), strict=True):
            drafts[index] = own
            if item.num_drafts:
                expected, rows = chain(modules, mode, texts[index], hidden[index], item.num_drafts)
                assert own == expected
                assert (logits - rows).abs().max() < TOLERANCE


def test_every_mode_drafts_differently(random_checkpoint):
    """So that a mode which is not in effect cannot pass for it."""
    directory = random_checkpoint("glm4_moe")
    tokens = random.Random(0).choices(range(96), k=4)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    modes = [parameter.values[0] for parameter in MODES]
    logits = [chain(references(directory, 3, mode), mode, tokens, hidden, 3)[1] for mode in modes]
    for first, second in combinations(logits, 2):
        assert (first - second).abs().max() > 1e-2


class Watched:
    """Checks the drafts of an engine's sequences against the plain reference, with transformers' hidden rows."""

    def __init__(self, directory, count, mode):
        self.mode = mode
        self.modules = references(directory, count, mode)
        self.target = transformers_model(Path(directory)).model
        self.checked = 0

    @torch.no_grad()
    def check(self, sequence):
        if sequence.draft_ids:
            hidden = self.target(torch.tensor([sequence.token_ids])).last_hidden_state[0, :-1]
            expected, logits = chain(self.modules, self.mode, sequence.token_ids, hidden, len(sequence.draft_ids))
            self.checked += 1
            for own, wanted, row in zip(sequence.draft_ids, expected, logits, strict=True):
                if own != wanted:  # rounding may choose between two that are equally likely
                    assert row[wanted] - row[own] < TOLERANCE, (sequence.draft_ids, expected)
                    break


def params(count):
    return SamplingParams(max_tokens=count, ignore_eos=True)


VANILLA = {"use_mtp_vanilla": True}


@pytest.mark.parametrize(("name", "count", "k", "mode"), [
    ("deepseek", 3, 3, VANILLA),
    ("glm", 2, 4, VANILLA | {"mtp_carry": "raw", "mask_pos0": True}),
    ("glm", 2, 3, {"use_mtp_vanilla": False, "mtp_carry": "raw", "mask_pos0": True}),
])  # fmt: skip
def test_every_draft_of_a_text(name, count, k, mode, several, make_llm, prompt_of):
    """Prompts shorter than the number of layers, prefill in chunks, drafts taken and refused."""
    directory = several(name, count)
    watched = Watched(directory, count, mode)
    engine = make_llm(directory, k, block_size=4, prefill_chunk_size=3, **mode).engine
    sequences = [engine.new_sequence(prompt_of(length, start=length), params(30)) for length in (1, 2, 3, 4, 11)]
    for sequence in sequences:
        engine.add(sequence)
    accepted = set()
    while engine.has_work:
        accepted |= {output.num_accepted for output in engine.step()}
        for sequence in sequences:
            watched.check(sequence)
    assert watched.checked > 40 and {0, k} <= accepted


def test_a_checkpoint_is_made_the_same_each_time(several, tmp_path):
    """Else what is accepted differs from run to run, since the library hands tensors out in no order."""
    first = Path(several("glm", 2)) / "model.safetensors"
    for count in range(3):
        again = save_with_mtp_layers(tmp_path / str(count), DEMO["glm"], 2, NOISE) / "model.safetensors"
        assert again.read_bytes() == first.read_bytes()


@pytest.mark.parametrize("name", DEMO)
@pytest.mark.parametrize("count", [2, 3])
def test_generation_of_transformers(name, count, several, make_llm, prompt_of):
    """Tokens, verify steps and accepted drafts of generate(use_mtp=True) with as many drafts as layers."""
    prompt = prompt_of(23)
    ids, offered = generated(several(name, count), prompt, 50)
    output = make_llm(several(name, count), count, use_mtp_vanilla=True).generate(prompt, params(50))[0]
    assert output.token_ids == ids[len(prompt) :]
    # The last token of a text is the target's own here; transformers drafts past it.
    verified = [(drafts, ids[length:-1]) for length, drafts in offered if length + 1 < len(ids)]
    accepted = [matches(drafts, text) for drafts, text in verified]
    assert output.num_spec_steps == len(verified)
    assert output.num_accepted_draft_tokens == sum(accepted)
    assert {0, count} <= set(accepted)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("count", [2, 3])
def test_drafts_of_transformers(model_type, count, tmp_path, make_llm):
    """Every draft for a random checkpoint, whose drafts are hardly ever right."""
    directory = save_random(tmp_path, model_type, num_mtp=count)
    # transformers knows no embedding and head of an MTP layer's own.
    edit_tensors(directory, drop_own)
    prompt = random.Random(count).choices(range(1, 96), k=9)
    ids, offered = generated(directory, prompt, 20)
    engine = make_llm(str(directory), count, use_mtp_vanilla=True).engine
    sequence = engine.new_sequence(prompt, params(20), with_text=False)
    engine.add(sequence)
    drafts = {}
    while engine.has_work:
        engine.step()
        drafts[len(sequence.token_ids)] = list(sequence.draft_ids)
    assert sequence.token_ids == ids
    full = {length: own for length, own in drafts.items() if len(own) == count}
    assert len(full) > 8
    assert full == {length: own for length, own in offered if length in full}


def drop_own(tensors):
    for name in [name for name in tensors if name.endswith((".embed_tokens.weight", "shared_head.head.weight"))]:
        if name != "model.embed_tokens.weight":
            del tensors[name]


def generated(directory, prompt, count):
    """What transformers generates with drafts: all tokens, and (length of the text, drafts) of every step."""
    offered, original = [], MTPCandidateGenerator.get_candidates

    def recorded(self, input_ids, *args, **kwargs):
        ids, logits = original(self, input_ids, *args, **kwargs)
        if logits is not None:
            offered.append((input_ids.shape[1], ids[0, input_ids.shape[1] :].tolist()))
        return ids, logits

    with patch.object(MTPCandidateGenerator, "get_candidates", recorded):
        return greedy(transformers_model(Path(directory)), prompt, count, use_mtp=True), offered


def matches(drafts, tokens):
    return next(
        (i for i, (a, b) in enumerate(zip(drafts, tokens, strict=False)) if a != b), min(len(drafts), len(tokens))
    )


@pytest.mark.parametrize(
    ("name", "count", "k", "chunk"),
    [
        ("deepseek", 2, 1, 2),
        ("deepseek", 2, 4, 7),
        ("deepseek", 3, 3, 64),
        ("glm", 2, 3, 7),
        ("glm", 3, 2, 64),
        ("glm", 3, 4, 2),
    ],
)
def test_text_of_mixed_batches(name, count, k, chunk, several, make_llm, prompt_of, greedy):
    """The text is that of decoding without drafts: prompts of 1 … 13 tokens that leave at different times."""
    llm = make_llm(several(name, count), k, block_size=4, prefill_chunk_size=chunk, use_mtp_vanilla=True)
    lengths = [1, 2, 3, 4, 5, 8, 13]
    prompts = [prompt_of(length, start=length) for length in lengths]
    counts = [3 + 5 * index % 17 for index in range(len(lengths))]
    for prompt, count, output in zip(prompts, counts, llm.generate(prompts, [*map(params, counts)]), strict=True):
        assert output.token_ids == greedy(str(DEMO[name]), prompt, 20)[:count]


@pytest.mark.parametrize(("name", "k"), [("deepseek", 2), ("glm", 4)])
def test_text_in_a_tight_pool(name, k, several, make_llm, prompt_of, greedy, tight_pool, preemptions):
    """Sequences lose their blocks and start again, up to the model's limit; their drafts stay right."""
    directory = several(name, 3)
    options = {"block_size": 4, "max_model_len": 32, "prefill_chunk_size": 7}
    engine = make_llm(
        directory, k, use_mtp_vanilla=True, kv_cache_bytes=tight_pool(directory, k, 4, 11, vanilla=True), **options
    ).engine
    assert engine.pool.num_blocks == 11
    watched = Watched(directory, 3, VANILLA)
    prompts = [prompt_of(length, start=length) for length in (1, 9, 17, 25)]
    sequences = [engine.new_sequence(prompt, params(None)) for prompt in prompts]
    for sequence in sequences:
        engine.add(sequence)
    with preemptions(engine) as preempted:
        while engine.has_work:
            engine.step()
            for sequence in sequences[1:3]:
                watched.check(sequence)
    assert preempted and watched.checked
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.token_ids[len(prompt) :] == greedy(str(DEMO[name]), prompt, 31)[: 32 - len(prompt)]


@pytest.mark.parametrize("mode", [{"use_mtp_vanilla": False}, VANILLA], ids=["eagle", "vanilla"])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_paced_sequences_that_seldom_ask_for_drafts(mode, chunk, several, make_llm, prompt_of, greedy):
    """Drafts are the same however many steps go without them, and over tokens that the client appends."""
    directory = several("deepseek", 3)
    watched = Watched(directory, 3, mode)
    engine = make_llm(directory, 3, block_size=4, prefill_chunk_size=chunk, **mode).engine
    sequences = [engine.new_sequence(prompt_of(length), params(None), paced=True) for length in (1, 2, 6)]
    chance = random.Random(chunk)

    def step(sequence):
        engine.add(sequence)
        while sequence.status is not Status.PAUSED:
            engine.step()
        rows = sequence.hidden.tensor
        assert len(rows) <= chunk + 4  # what a step of four tokens leaves comes on top
        assert rows.untyped_storage().nbytes() == rows.nbytes

    for number in range(10):
        for sequence in sequences:
            if number == 5:
                engine.append(sequence, prompt_of(3, start=20))
                if chance.random() < 0.5:
                    engine.request_drafts(sequence)  # for a text that is not computed to its end
                    engine.step()
                    assert not sequence.draft_ids
            step(sequence)
            if chance.random() < 0.4:
                engine.request_drafts(sequence)
                engine.step()
                assert len(sequence.draft_ids) == 3
                watched.check(sequence)
    assert watched.checked > 6
    for sequence in sequences:
        plain = greedy(str(DEMO["deepseek"]), sequence.token_ids[: sequence.num_prompt_tokens], 4)
        assert sequence.token_ids[sequence.num_prompt_tokens :][:4] == plain
        engine.remove(sequence)


def test_what_drafts_leave_in_the_cache_is_never_read(several, make_llm, prompt_of):
    """Layer m's slots from m positions before the last computed one on may hold anything."""
    engine = make_llm(several("glm", 2), 3, block_size=4, use_mtp_vanilla=True).engine
    caches = [part.flatten(0, 1) for layer in engine._drafter._caches for part in layer]

    def drafts_of_a_text(poison):
        sequence, seen = engine.new_sequence(prompt_of(5), params(16)), []
        engine.add(sequence)
        while engine.has_work:
            engine.step()
            seen.append(list(sequence.draft_ids))
            for layer, parts in enumerate(engine._drafter._caches if poison else []):
                known = range(max(0, sequence.num_drafted - layer)) if sequence.block_table else []
                written = [sequence.block_table[at // 4] * 4 + at % 4 for at in known]
                for part in parts:
                    held = part.flatten(0, 1)[written]
                    part.fill_(float("nan")).flatten(0, 1)[written] = held
        return seen

    clean = drafts_of_a_text(poison=False)
    try:
        assert drafts_of_a_text(poison=True) == clean
    finally:
        for part in caches:
            part.zero_()


def test_layers_that_are_built(several, make_llm):
    """As many MTP layers as drafts use, and a layer of keys for each draft of Vanilla."""
    directory = several("glm", 2)
    target = json.loads((Path(directory) / "config.json").read_text())["num_hidden_layers"]
    for k, options, built, layers in ((3, {}, 1, 1), (1, VANILLA, 1, 1), (2, VANILLA, 2, 2), (3, VANILLA, 2, 3)):
        engine = make_llm(directory, k, max_model_len=16, **options).engine
        assert len(engine._drafter._modules) == built
        assert len(engine._drafter._caches) == layers
        assert len(engine._runner._target._context.target_caches) == target

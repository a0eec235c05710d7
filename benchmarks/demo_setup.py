"""Configurations, text, tokenizer and files of the demo checkpoints.

The text is the King James Bible (public domain), from the Debian package bible-kjv. A document is
a chapter; some chapters are held out from both the tokenizer and the training stream.
"""

import json
import random
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from demo_model import DemoModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BIBLE_COMMAND, BIBLE_PACKAGE = ["bible", "-f", "Gen1:1-Rev22:21"], "bible-kjv"
VERSE_LINE = re.compile(r"(?P<book>[1-3]?[A-Za-z]+)(?P<chapter>\d+):(?P<verse>\d+) (?P<text>.+)")

VOCAB_SIZE = 1024
MAX_LENGTH = 4096
HELD_OUT_SHARE, SPLIT_SEED = 0.04, 0  # the split of the shipped checkpoints: keep it
CHAT_SHARE, CHAT_SEED, ANSWER_VERSES = 0.3, 1, 3

SHARED_CONFIG = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "attention_dropout": 0.0,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}
CONFIGS = {
    "deepseek_v3": SHARED_CONFIG
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "attention_bias": False,
        "moe_layer_freq": 1,
        "ep_size": 1,
    },
    "glm4_moe": SHARED_CONFIG
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.5,
        "bos_token_id": None,
        "eos_token_id": [1, 3],
        "pad_token_id": 1,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
}


@dataclass(frozen=True)
class ChatFormat:
    """Special tokens of one architecture and the way they mark a conversation."""

    special_tokens: tuple[str, ...]  # in the order of their ids, from 0
    prefix: tuple[str, ...]  # opens every sequence
    end: str
    pad: str
    user: str
    assistant: str

    def template(self) -> str:
        """The Jinja chat template of tokenizer_config.json."""
        opening = "{{ bos_token }}" if len(self.prefix) == 1 else "".join(self.prefix)
        return (
            opening + "{% for m in messages %}"
            "{% if m.role == 'user' %}" + self.user + "{{ m.content }}"
            "{% elif m.role == 'assistant' %}"
            + self.assistant
            + "{{ m.content }}"
            + self.end
            + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}" + self.assistant + "{% endif %}"
        )


CHAT_FORMATS = {
    "deepseek_v3": ChatFormat(
        special_tokens=(
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            "<｜▁pad▁｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
        ),
        prefix=("<｜begin▁of▁sentence｜>",),
        end="<｜end▁of▁sentence｜>",
        pad="<｜▁pad▁｜>",
        user="<｜User｜>",
        assistant="<｜Assistant｜>",
    ),
    "glm4_moe": ChatFormat(
        special_tokens=("[gMASK]", "<|endoftext|>", "<sop>", "<|user|>", "<|assistant|>"),
        prefix=("[gMASK]", "<sop>"),
        end="<|endoftext|>",
        pad="<|endoftext|>",
        user="<|user|>",
        assistant="<|assistant|>",
    ),
}


class CorpusError(Exception):
    """The text cannot be had; the message says what to do about it."""


@dataclass(frozen=True)
class Chapter:
    """One chapter: its title line and its numbered verses."""

    title: str
    verses: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join((self.title, *self.verses))


def read_text(corpus_file: Path | None = None) -> str:
    """The lines `bible -f` prints, from a file or from the command itself."""
    if corpus_file is not None:
        return corpus_file.read_text(encoding="utf-8")
    try:
        return subprocess.run(BIBLE_COMMAND, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise CorpusError(
            f"the command 'bible' was not found: install the Debian package {BIBLE_PACKAGE} "
            f"(apt-get install {BIBLE_PACKAGE}), or pass --corpus FILE with the output of "
            f"'{' '.join(BIBLE_COMMAND)}' from another machine"
        ) from None
    except subprocess.CalledProcessError as error:
        raise CorpusError(f"'{' '.join(BIBLE_COMMAND)}' failed: {error.stderr.strip()}") from None


def load_chapters(corpus_file: Path | None = None) -> tuple[list[Chapter], list[Chapter]]:
    """The chapters to train on and those held out, a fixed random share."""
    verses_by_chapter: dict[str, list[str]] = {}
    for line in read_text(corpus_file).splitlines():
        if match := VERSE_LINE.fullmatch(line):
            verses = verses_by_chapter.setdefault(f"{match['book']} {match['chapter']}", [])
            verses.append(f"{match['verse']} {match['text']}")
    split = random.Random(SPLIT_SEED)
    train: list[Chapter] = []
    held_out: list[Chapter] = []
    for title, verses in verses_by_chapter.items():
        part = held_out if split.random() < HELD_OUT_SHARE else train
        part.append(Chapter(title, tuple(verses)))
    if not train or not held_out:
        raise CorpusError("too few lines of the form 'Ge1:1 In the beginning ...' in the text")
    return train, held_out


def train_tokenizer(arch: str, texts: list[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train byte-level BPE; the special tokens of the architecture take the first ids."""
    chat_format = CHAT_FORMATS[arch]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(chat_format.special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join((*chat_format.prefix, "$A")),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in chat_format.prefix],
    )
    return tokenizer


def write_json(path: Path, values: dict) -> None:
    """One way of writing for every JSON file of a checkpoint."""
    path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def save_tokenizer(tokenizer: Tokenizer, arch: str, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    chat_format = CHAT_FORMATS[arch]
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": chat_format.prefix[0],
        "eos_token": chat_format.end,
        "pad_token": chat_format.pad,
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_format.template(),
    }
    write_json(directory / "tokenizer_config.json", settings)


def document_tokens(tokenizer: Tokenizer, arch: str, text: str) -> list[int]:
    """A whole text between the opening and the end token."""
    return tokenizer.encode(text).ids + [tokenizer.token_to_id(CHAT_FORMATS[arch].end)]


def chat_tokens(tokenizer: Tokenizer, arch: str, chapter: Chapter) -> list[int]:
    """A chapter as conversations: the user gives a verse, the assistant the ones after it."""
    chat_format = CHAT_FORMATS[arch]
    user, assistant, end = map(tokenizer.token_to_id, (chat_format.user, chat_format.assistant, chat_format.end))
    tokens: list[int] = []
    for start in range(0, len(chapter.verses) - ANSWER_VERSES, ANSWER_VERSES + 1):
        question = tokenizer.encode(chapter.verses[start], add_special_tokens=False).ids
        answer_text = "\n".join(chapter.verses[start + 1 : start + 1 + ANSWER_VERSES])
        answer = tokenizer.encode(answer_text, add_special_tokens=False).ids
        tokens += map(tokenizer.token_to_id, chat_format.prefix)
        tokens += [user, *question, assistant, *answer, end]
    return tokens


def training_documents(tokenizer: Tokenizer, arch: str, chapters: list[Chapter]) -> list[list[int]]:
    """Every chapter as plain text, and some of them as conversations too."""
    chooser = random.Random(CHAT_SEED)
    documents = []
    for chapter in chapters:
        documents.append(document_tokens(tokenizer, arch, chapter.text))
        if chooser.random() < CHAT_SHARE:
            documents.append(chat_tokens(tokenizer, arch, chapter))
    return documents


def endless_batches(documents: list[list[int]], batch_size: int, length: int, seed: int):
    """Yield [batch_size, length] windows of the stream, shuffled again for every epoch."""
    window = batch_size * length
    if sum(map(len, documents)) < window:
        raise CorpusError(f"the text gives fewer than the {window} tokens of one batch")
    shuffler = random.Random(seed)
    order = list(documents)
    while True:
        shuffler.shuffle(order)
        stream = torch.tensor([token for document in order for token in document])
        for start in range(0, len(stream) - window + 1, window):
            yield stream[start : start + window].view(batch_size, length)


def save_checkpoint(model: DemoModel, directory: Path) -> None:
    """Write model.safetensors, config.json and generation_config.json."""
    config, tensors = model.config, dict(model.state_dict())
    mtp = f"model.layers.{config['num_hidden_layers']}"
    tensors[f"{mtp}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors[f"{mtp}.shared_head.head.weight"] = tensors["lm_head.weight"]
    tensors = {
        name: tensor.to(torch.float32 if "correction_bias" in name else torch.bfloat16).clone()
        for name, tensor in tensors.items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", generation | {"do_sample": False})


def load_checkpoint(directory: Path) -> DemoModel:
    """Read what save_checkpoint wrote, for computing in float32."""
    model = DemoModel(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    tensors = load_file(directory / "model.safetensors")
    model.load_state_dict({name: tensors[name].float() for name in model.state_dict()})
    return model.eval()

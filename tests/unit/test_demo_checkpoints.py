"""The shipped demo checkpoints and the code that makes them; nothing here trains a model."""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
from safetensors import safe_open  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import demo_setup  # noqa: E402
import train_demo  # noqa: E402
from demo_model import DemoModel  # noqa: E402

SHIPPED = {
    "deepseek_v3": ROOT / "checkpoints" / "deepseek-demo",
    "glm4_moe": ROOT / "checkpoints" / "glm-demo",
}
PROMPTS = {
    "deepseek_v3": "<｜begin▁of▁sentence｜><｜User｜>Hear, O Israel:<｜Assistant｜>",
    "glm4_moe": "[gMASK]<sop><|user|>Hear, O Israel:<|assistant|>",
}
ATTENTION = {
    "deepseek_v3": (
        "q_a_proj.weight",
        "q_a_layernorm.weight",
        "q_b_proj.weight",
        "kv_a_proj_with_mqa.weight",
        "kv_a_layernorm.weight",
        "kv_b_proj.weight",
        "o_proj.weight",
    ),
    "glm4_moe": (
        "q_proj.weight",
        "q_proj.bias",
        "k_proj.weight",
        "k_proj.bias",
        "v_proj.weight",
        "v_proj.bias",
        "q_norm.weight",
        "k_norm.weight",
        "o_proj.weight",
    ),
}
MTP_ONLY = (
    "enorm.weight",
    "hnorm.weight",
    "eh_proj.weight",
    "shared_head.norm.weight",
    "shared_head.head.weight",
    "embed_tokens.weight",
)
TEXT = "1 In the beginning was the Word,\nand — naïve ☃ — 3.14 {'x': [1]}\t"
CHAPTER = demo_setup.Chapter("Ge 1", tuple(f"{number} And it was so." for number in range(1, 9)))


@pytest.fixture(params=sorted(SHIPPED))
def arch(request) -> str:
    return request.param


@pytest.fixture
def shipped(arch) -> Path:
    return SHIPPED[arch]


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def tensor_types(directory: Path) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of every tensor, by name."""
    with safe_open(directory / "model.safetensors", "pt") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}
        return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}


def official_names(arch: str, config: dict) -> set[str]:
    """The tensor names of the official checkpoints, for this number of layers and experts."""
    projections = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    depth = config["num_hidden_layers"]
    for index in range(depth + config["num_nextn_predict_layers"]):
        parts = ["input_layernorm.weight", "post_attention_layernorm.weight"]
        parts += [f"self_attn.{name}" for name in ATTENTION[arch]]
        if index < config["first_k_dense_replace"]:
            blocks = ["mlp"]
        else:
            parts += ["mlp.gate.weight", "mlp.gate.e_score_correction_bias"]
            blocks = [f"mlp.experts.{expert}" for expert in range(config["n_routed_experts"])]
            blocks.append("mlp.shared_experts")
        parts += [f"{block}.{projection}" for block in blocks for projection in projections]
        parts += MTP_ONLY if index >= depth else ()
        names |= {f"model.layers.{index}.{part}" for part in parts}
    return names


def same_tensors(directory: Path, names: tuple[str, str]) -> bool:
    with safe_open(directory / "model.safetensors", "pt") as tensors:
        return torch.equal(*(tensors.get_tensor(name) for name in names))


def test_size(shipped):
    assert sum(path.stat().st_size for path in shipped.iterdir()) <= 13_000_000


def test_official_tensor_names(arch, shipped):
    assert set(tensor_types(shipped)) == official_names(arch, read_json(shipped / "config.json"))


def test_mtp_layer_follows_the_main_layers(shipped):
    names = tensor_types(shipped)
    assert {f"model.layers.4.{name}" for name in MTP_ONLY} <= set(names)
    assert not any(f"layers.{index}.{MTP_ONLY[0]}" in name for name in names for index in range(4))


def test_mtp_layer_shares_embedding_and_head(shipped):
    assert same_tensors(shipped, ("model.embed_tokens.weight", "model.layers.4.embed_tokens.weight"))
    assert same_tensors(shipped, ("lm_head.weight", "model.layers.4.shared_head.head.weight"))


def test_dtypes(shipped):
    for name, (_, dtype) in tensor_types(shipped).items():
        assert dtype == ("F32" if name.endswith("e_score_correction_bias") else "BF16"), name


def test_weights_are_finite_and_trained(shipped):
    with safe_open(shipped / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():
            tensor = tensors.get_tensor(name)
            assert tensor.isfinite().all() and tensor.any(), name


def test_tokenizer_gives_text_back(arch, shipped):
    tokenizer = Tokenizer.from_file(str(shipped / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == read_json(shipped / "config.json")["vocab_size"]
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT
    opening = [tokenizer.id_to_token(token) for token in tokenizer.encode("").ids]
    assert opening == list(demo_setup.CHAT_FORMATS[arch].prefix)


def test_special_token_ids(arch, shipped):
    tokenizer = Tokenizer.from_file(str(shipped / "tokenizer.json"))
    config, settings = (read_json(shipped / n) for n in ("config.json", "tokenizer_config.json"))
    ends = config["eos_token_id"] if arch == "glm4_moe" else [config["eos_token_id"]]
    assert tokenizer.token_to_id(settings["eos_token"]) == ends[0]
    assert tokenizer.token_to_id(settings["pad_token"]) == config["pad_token_id"]
    generation = read_json(shipped / "generation_config.json")
    assert generation.pop("do_sample") is False
    assert generation.items() <= config.items()


def test_chat_template(arch, shipped):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(shipped)
    user = {"role": "user", "content": "Hear, O Israel:"}
    text = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    assert text == PROMPTS[arch]
    # training conversations are what the template makes of them
    turns = [
        {"role": "user", "content": CHAPTER.verses[0]},
        {"role": "assistant", "content": "\n".join(CHAPTER.verses[1:4])},
    ]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    expected = tokenizer.encode(rendered, add_special_tokens=False)
    raw = Tokenizer.from_file(str(shipped / "tokenizer.json"))
    assert demo_setup.chat_tokens(raw, arch, CHAPTER)[: len(expected)] == expected


def test_untrained_export_has_the_shipped_form(arch, shipped, tmp_path):
    demo_setup.save_checkpoint(DemoModel(demo_setup.CONFIGS[arch]), tmp_path)
    demo_setup.save_tokenizer(demo_setup.train_tokenizer(arch, [CHAPTER.text]), arch, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in shipped.iterdir()}
    assert tensor_types(tmp_path) == tensor_types(shipped)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert read_json(tmp_path / name) == read_json(shipped / name)
    made, given = (read_json(path / "tokenizer.json") for path in (tmp_path, shipped))
    for tokenizer in (made, given):
        tokenizer["model"].pop("vocab"), tokenizer["model"].pop("merges")
    assert made == given
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in tmp_path.iterdir())


@torch.no_grad()
def test_training_module_computes_what_transformers_does(arch, shipped):
    transformers = pytest.importorskip("transformers")
    tokens = torch.arange(5, 1024, 9)[None]
    model = demo_setup.load_checkpoint(shipped)
    reference = transformers.AutoModelForCausalLM.from_pretrained(shipped, dtype=torch.float32)
    difference = model.lm_head(model(tokens)) - reference.eval()(tokens).logits
    assert difference.abs().max() < 1e-4


@torch.no_grad()
def test_draft_passes_are_those_of_serving(arch, shipped):
    """All positions at once give what one position gives with a row more for every draft."""
    model = demo_setup.load_checkpoint(shipped)
    layer, embed = model.model["layers"][-1], model.model["embed_tokens"]
    tokens, last, steps = torch.arange(5, 1024, 50)[None], 9, 3
    hidden = model(tokens)
    passes = model.draft(tokens, hidden, steps)
    rows = hidden[:, : last + 1]
    for step in range(steps):
        embedding = embed(tokens[:, 1 : last + 2 + step])
        output, _ = layer(embedding, rows, torch.arange(rows.shape[1]))
        torch.testing.assert_close(output[:, -1], passes[step][:, last], atol=1e-4, rtol=1e-4)
        rows = torch.cat([rows, output[:, -1:]], dim=1)


def test_acceptance_walks_over_the_drafts(monkeypatch):
    monkeypatch.setattr(train_demo, "PROMPT_LENGTH", 2)
    tokens = torch.tensor([[7, 7, 1, 2, 3, 4, 5, 6, 8, 9]])
    first = torch.tensor([[0, 2, 0, 4, 0, 0, 0]])  # right at positions 1 and 3, then wrong
    second = torch.tensor([[0, 0, 0, 5, 0, 0, 0]])  # right at position 3
    assert train_demo.acceptance(tokens, [first, second], 2) == {
        "per_position": [0.667, 0.5],
        "tokens_per_step": 2.0,
    }


def test_missing_bible_command_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="bible-kjv"):
        train_demo.main(["--arch", "glm4_moe", "--output", str(tmp_path / "never")])
    assert not (tmp_path / "never").exists()

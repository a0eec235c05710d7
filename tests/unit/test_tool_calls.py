"""Calls of functions as a grammar: what a template writes is taken, every way through the grammar is calls."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling.grammar import GrammarCompiler
from mtp_backend.sampling.structured import StructuredOutput
from mtp_backend.sampling.tool_calls import TEMPLATES
from tokenizers import AddedToken, Tokenizer

TOKENIZER = Path(__file__).resolve().parents[2] / "checkpoints" / "deepseek-demo" / "tokenizer.json"
END = 1
MARKERS = [
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
]  # fmt: skip
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "a <b>\n"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "code": {"type": "string", "pattern": "^[a-c]{2}$"},
        "short": {"type": "string", "minLength": 1, "maxLength": 3},
        "list": {"type": "array", "items": {"$ref": "#/$defs/word"}, "maxItems": 2},
        "maybe": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
    },
    "required": ["count", "list"],
    "$defs": {"word": {"type": "string", "maxLength": 2}},
}
FUNCTIONS = [
    {"name": "get_weather", "parameters": PARAMETERS},
    {"name": "get.time-2"},
    {"name": "none", "parameters": {}},
]


def wanted(template, **fields):
    return {"tool_calls": {"template": template, "functions": FUNCTIONS, **fields}}


@pytest.fixture(scope="module", params=["text", "tokens"])
def tokenizer(request):
    """One whose vocabulary lacks the templates' markers, and one in which each is a token."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    if request.param == "tokens":
        tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), [END])


def allowed(grammar, tokenizer):
    logits = torch.zeros(1, tokenizer.get_vocab_size())
    grammar.apply(logits, [])
    return logits[0].isfinite().nonzero().flatten().tolist()


def refused_at(compiler, tokenizer, text, **structured):
    """Number of the first token that the grammar refuses, "end" where it wants more; None: it takes the text."""
    grammar = compiler.processor(StructuredOutput.from_dict(wanted(**structured)))
    for index, token in enumerate(tokenizer.encode(text, add_special_tokens=False).ids):
        if token not in allowed(grammar, tokenizer):
            return index
        grammar.commit([token])
    return None if END in allowed(grammar, tokenizer) else "end"


def v31(name, arguments):
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def v3(name, arguments):
    return v31("function", f"{name}\n```json\n{arguments}\n```")


def deepseek(calls):
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def glm(name, line="\n", **arguments):
    tags = [f"<arg_key>{k}</arg_key>{line}<arg_value>{v}</arg_value>{line}" for k, v in arguments.items()]
    return f"<tool_call>{name}{line}{''.join(tags)}</tool_call>"


ARGUMENTS = '{"text": "a</b> \\n\\u00e9", "unit": "a <b>\\n", "count": 7, "list": ["x"], "maybe": null}'
TAKEN = [
    ("deepseek_v3_1", deepseek(v31("get_weather", ARGUMENTS))),
    ("deepseek_v3_1", deepseek(v31("none", "{}") + v31("get.time-2", "{}"))),
    ("deepseek_v3", deepseek(v3("get_weather", ARGUMENTS))),
    ("deepseek_v3", deepseek(v3("none", "{}") + "\n" + v3("none", "{}"))),
    ("glm_4_5", glm("get_weather", text="a\tb\n</arg_valu <x>", count="7", code="ab", list='["x"]', maybe="null")),
    ("glm_4_5", "\n" + glm("none") + "\n" + glm("get_weather", "", unit="a <b>\n", count="0", short="漢", list="[]")),
]
REFUSED = [
    ("deepseek_v3_1", "x"),
    ("deepseek_v3_1", "So: " + deepseek(v31("none", "{}"))),
    ("deepseek_v3_1", deepseek(v31("other", "{}"))),
    ("deepseek_v3_1", deepseek(v31("get_weather", '{"count": 7}'))),
    ("deepseek_v3_1", deepseek(v31("get_weather", '{"count": 7.5, "list": []}'))),
    ("deepseek_v3_1", deepseek(v31("get_weather", '{"count": 7, "list": ["abc"]}'))),
    ("deepseek_v3_1", deepseek(v31("none", '{"a": 1}'))),
    ("deepseek_v3", deepseek(v31("none", "{}"))),
    ("glm_4_5", glm("get_weather", count="7")),
    ("glm_4_5", glm("get_weather", count="x", list="[]")),
    ("glm_4_5", glm("get_weather", count="7", code="abc", list="[]")),
    ("glm_4_5", glm("none", a="1")),
]


@pytest.mark.parametrize(("template", "text"), TAKEN)
def test_what_templates_write_is_taken(compiler, tokenizer, template, text):
    assert refused_at(compiler, tokenizer, text, template=template) is None
    several = text.count("<tool_call>") + text.count("<｜tool▁call▁begin｜>") > 1
    refused = refused_at(compiler, tokenizer, text, template=template, parallel=False) is not None
    assert refused == several


@pytest.mark.parametrize(("template", "text"), REFUSED)
def test_what_is_no_call_is_refused(compiler, tokenizer, template, text):
    assert refused_at(compiler, tokenizer, text, template=template) not in (None, "end")


def test_not_all_of_a_message(compiler, tokenizer):
    text = "<｜tool▁calls▁begin｜>" + v31("none", "{}")
    assert refused_at(compiler, tokenizer, text, template="deepseek_v3_1") == "end"


def walk(grammar, tokenizer, seed, longest=300):
    """A random output; in free texts rather what could end them. None where it became too long."""
    choose, tokens = random.Random(seed), []
    while len(tokens) < longest:
        options = allowed(grammar, tokenizer)
        if options == [END] or (END in options and choose.random() < 0.5):
            return tokenizer.decode(tokens, skip_special_tokens=False)
        options = [option for option in options if option != END]
        closing = [option for option in options if re.search('["\n<>{}/]', tokenizer.decode([option], False))]
        tokens.append(choose.choice(closing if closing and choose.random() < 0.7 else options))
        grammar.commit([tokens[-1]])
    return None


def read_json(text):
    """The calls of a whole DeepSeek output: names and arguments, read from left to right."""
    decoder, calls = json.JSONDecoder(), []
    text = re.fullmatch("<｜tool▁calls▁begin｜>(.*)<｜tool▁calls▁end｜>", text, re.DOTALL)[1]
    while text:
        head = re.match(
            r"\n?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([\w.-]+)\n```json\n|([\w.-]+)<｜tool▁sep｜>)", text
        )
        arguments, end = decoder.raw_decode(text, head.end())
        tail = re.compile(r"(\n```)?<｜tool▁call▁end｜>").match(text, end)
        assert bool(tail[1]) == bool(head[1])
        calls.append((head[1] or head[2], arguments))
        text = text[tail.end() :]
    return calls


def read_tags(text):
    """The calls of a whole GLM output."""
    argument = "<arg_key>(.*?)</arg_key>\n?<arg_value>(.*?)</arg_value>\n?"
    call = re.compile(f"\n?<tool_call>([\\w.-]+)\n?((?:{argument})*)</tool_call>", re.DOTALL)
    calls, at = [], 0
    while at < len(text):
        found = call.match(text, at)
        given = re.findall(argument, found[2], re.DOTALL)
        assert len(dict(given)) == len(given)
        texts = [key for key, schema in PARAMETERS["properties"].items() if schema.get("type") == "string"]
        calls.append(
            (found[1], {key: value if key in texts else json.loads(value, strict=False) for key, value in given})
        )
        at = found.end()
    return calls


def check(name, arguments):
    """Whether a call is one of FUNCTIONS."""
    if name != "get_weather":
        assert name in ("get.time-2", "none") and arguments == {}
        return
    assert {"count", "list"} <= arguments.keys() <= PARAMETERS["properties"].keys()
    assert type(arguments["count"]) is int and 0 <= arguments["count"] <= 99
    assert len(arguments["list"]) <= 2 and all(len(word) <= 2 for word in arguments["list"])
    assert isinstance(arguments.get("text", ""), str) and arguments.get("unit", "C") in ("C", "a <b>\n")
    assert re.fullmatch("[a-c]{2}", arguments.get("code", "aa")) and 1 <= len(arguments.get("short", "a")) <= 3
    assert arguments.get("maybe") is None or len(arguments["maybe"]) <= 2


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_way_is_calls(compiler, tokenizer, template):
    names = []
    for seed in range(24):
        parallel = seed % 2 == 0
        structured = StructuredOutput.from_dict(wanted(template, parallel=parallel))
        text = walk(compiler.processor(structured), tokenizer, seed)
        if text is not None:
            calls = (read_tags if template == "glm_4_5" else read_json)(text)
            assert len(calls) >= 1 if parallel else len(calls) == 1
            for name, arguments in calls:
                check(name, arguments)
            names.append([name for name, _ in calls])
    assert len(names) > 8 and any(len(one) > 1 for one in names) and "get_weather" in sum(names, [])


def test_markers_are_tokens_where_the_vocabulary_has_them(compiler, tokenizer):
    """Never the texts of other tokens, and the tokens nowhere else."""
    marker = tokenizer.token_to_id("<｜tool▁calls▁begin｜>")
    grammar = compiler.processor(StructuredOutput.from_dict(wanted("deepseek_v3_1")))
    assert allowed(grammar, tokenizer) == [marker] if marker else len(allowed(grammar, tokenizer)) > 0
    if marker:
        begin = tokenizer.encode(TAKEN[0][1].partition("a</b>")[0], add_special_tokens=False).ids
        grammar.commit(begin)
        inside = allowed(grammar, tokenizer)
        assert len(inside) > 500 and not {tokenizer.token_to_id(one) for one in MARKERS} & set(inside)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"template": "xml"}, "template"),
        ({"template": None}, "template"),
        ({"parallel": 1}, "parallel"),
        ({"other": 1}, "other"),
        ({"functions": []}, "functions"),
        ({"functions": "f"}, "functions"),
        ({"functions": [{"name": "f"}] * 129}, "functions"),
        ({"functions": ["f"]}, "functions[0]"),
        ({"functions": [{"name": "f", "strict": True}]}, "functions[0].strict"),
        ({"functions": [{"name": "f"}, {}]}, "functions[1].name"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [{"name": "f", "parameters": {"type": "string"}}]}, "functions[0].parameters"),
        ({"functions": [{"name": "f", "parameters": True}]}, "functions[0].parameters"),
        ({"functions": [{"name": "f", "parameters": {"not": {}}}]}, "functions[0].parameters.not"),
    ],
)
def test_refused(change, field):
    calls = {"template": "glm_4_5", "functions": [{"name": "f"}]} | change
    with pytest.raises(InvalidArgument) as error:
        StructuredOutput.from_dict({"tool_calls": calls})
    assert str(error.value).startswith(f"structured_output.tool_calls.{field}: got ")


@pytest.mark.parametrize(
    ("properties", "field"),
    [
        ({"a": {"type": "string", "format": "date"}}, "properties.a.format"),
        ({"a": {"type": "string", "pattern": "a<b"}}, "properties.a.pattern"),
        ({"a": {"type": "string", "enum": ["</arg_value>"]}}, "properties.a"),
        ({"a": {"type": "string", "const": ""}}, "properties.a"),
        ({"a<b": {"type": "string"}}, "properties"),
    ],
)
def test_what_glm_cannot_write(properties, field):
    """It is fine in JSON, and refused where an argument stands as it is."""
    for template in TEMPLATES:
        functions = [{"name": "f", "parameters": {"type": "object", "properties": properties}}]
        structured = {"tool_calls": {"template": template, "functions": functions}}
        if template != "glm_4_5":
            StructuredOutput.from_dict(structured)
            continue
        with pytest.raises(InvalidArgument) as error:
            StructuredOutput.from_dict(structured)
        message = f"structured_output.tool_calls.functions[0].parameters.{field}: got "
        assert str(error.value).startswith(message)

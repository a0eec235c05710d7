"""Chat templates: the prompts of transformers, and messages that are refused."""

import json
from pathlib import Path

import pytest
from mtp_client import InvalidArgument, chat
from mtp_client.chat import ChatTemplate
from transformers import AutoTokenizer

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '<b>Why?</b> & "so" 漢'},
    {"role": "assistant", "content": "<think>hm</think>  Because.  ", "reasoning_content": "hm"},
    {"role": "user", "content": "And?"},
]
# What the templates of DeepSeek and GLM checkpoints use: namespaces, macros, methods of texts, loop controls, white
# space control, JSON, the date, variables that may be undefined, an opening marker in the prompt.
TEMPLATE = """{% if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- set ns = namespace(system='', count=0) %}
{%- macro visible(content) -%}
    {%- if content is string %}{{ content }}{% else %}{{ raise_exception('no text') }}{% endif -%}
{%- endmacro -%}
{% for m in messages %}
  {% if m.role == 'system' %}
    {% set ns.system = ns.system + m['content'] %}
    {% continue %}
  {% endif %}
  {% if loop.index0 > 8 %}
    {% break %}
  {% endif %}
  {% set ns.count = ns.count + 1 %}
{% endfor %}
{{ bos_token }}{{ ns.system }} {{ ns.count }} {{ strftime_now('%%') }}
{%- for m in messages if m.role != 'system' %}
  {%- set content = visible(m.content) %}
  {%- if m.tool_calls %}never{% endif %}
  {%- if m['tool_calls'] is defined and m['tool_calls'] is not none %}never{% endif %}
  {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
<|{{ m.role | capitalize }}|>{{ content.strip() }}{{ m.reasoning_content | tojson if m.reasoning_content is defined }}
{{ {'a': content} | tojson(ensure_ascii=False) }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '<think>' if thinking else '</think>' }}{% endif %}
"""


@pytest.mark.parametrize("name", ["deepseek-demo", "glm-demo"])
def test_checkpoints(name):
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / name)
    ours = chat.load(CHECKPOINTS / name, None).render(MESSAGES, {})
    assert ours == tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert len(ours) > 50


@pytest.mark.parametrize("variables", [{}, {"thinking": True}, {"thinking": False, "unused": [1]}])
def test_features(variables):
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "deepseek-demo")
    ours = ChatTemplate(TEMPLATE, {"bos_token": tokenizer.bos_token}).render(MESSAGES, variables)
    theirs = tokenizer.apply_chat_template(
        MESSAGES, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True, **variables
    )
    assert ours == theirs
    assert ours.rstrip().endswith("<think>") == variables.get("thinking", False)
    assert "<b>Why?</b>" in ours and "never" not in ours and "漢" in ours


def test_where_a_template_is_found(tmp_path):
    """A file that is named, else the folder's chat_template.jinja, else its configuration, whose default counts."""
    messages = [{"role": "user", "content": "x"}]

    def rendered(template=None):
        found = chat.load(tmp_path, template)
        return found and found.render(messages, {})

    config = {"bos_token": {"content": "<s>"}, "eos_token": None, "unk_token": "?"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered() is None
    config["chat_template"] = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ bos_token }}1"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered() == "<s>1"
    config["chat_template"] = "{{ bos_token }}2"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered() == "<s>2"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}3")
    assert rendered() == "<s>3"
    (tmp_path / "other").write_text("{{ unk_token }}4")
    assert rendered(tmp_path / "other") == "?4"
    assert chat.load(None, None) is None


def test_wrong_templates(tmp_path):
    with pytest.raises(InvalidArgument, match="expected token"):
        ChatTemplate("{{ 1 2 }}", {})
    with pytest.raises(InvalidArgument, match="uses bos_token, which the tokenizer's folder must give"):
        ChatTemplate("{{ bos_token }}", {"eos_token": ""})
    with pytest.raises(InvalidArgument, match="tokenizer_config.json: .*No such file"):
        chat.load(tmp_path, None)
    for content, message in (("{", "not JSON"), ("[]", "not a JSON object"), ('{"chat_template": 1}', "is not a text")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(InvalidArgument, match=message):
            chat.load(tmp_path, None)


def test_sandbox():
    """A template reaches no Python internals and changes none of the messages."""
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__subclasses__() }}",
    ):
        with pytest.raises(InvalidArgument, match="refuses them"):
            ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], {})


def test_content():
    """Parts are joined; the newer name of the system role is the templates' name; null counts as left out."""
    template = ChatTemplate("{% for m in messages %}{{ m | tojson }}{% endfor %}", {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    shown = template.render([{"role": "developer", "content": parts, "name": None, "tool_calls": []}], {})
    assert json.loads(shown) == {"role": "system", "content": "ab"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("text", "messages[0]"),
        ({"content": "a"}, "messages[0].role"),
        ({"role": "function", "content": "a"}, "messages[0].role"),
        ({"role": "tool", "content": "a", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": ["user"], "content": "a"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "a", "name": "me"}, "messages[0].name"),
        ({"role": "user", "content": "a", "reasoning_content": "b"}, "messages[0].reasoning_content"),
        ({"role": "assistant", "content": "a", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
    ],
)
def test_refused_messages(message, param):
    with pytest.raises(InvalidArgument) as caught:
        ChatTemplate("", {}).render([message], {})
    assert str(caught.value).startswith(f"{param}: got ")


DEEP = '{"a": ' * 100_000


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"a": "\\ud800"}', '{"\\udc00": 1}', "[" * 100_000, DEEP, 5, [1]])
def test_refused_arguments(arguments):
    """The text of earlier calls is JSON within JSON, which may hold what the message's own may not."""
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": arguments}}]}
    with pytest.raises(InvalidArgument, match=r"messages\[0\].tool_calls\[0\].function.arguments: got .*; allowed: "):
        ChatTemplate("", {}).render([message], {})


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ADD = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLS = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "tool_calls": [ADD]},
    {"role": "tool", "tool_call_id": "c", "content": "2"},
]
FORMS = {
    # GLM goes over the arguments, DeepSeek writes their JSON text.
    "glm": "{% for k, v in call.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson }}</arg_value>{% endfor %}",
    "deepseek": "{{ '<｜tool▁sep｜>' + call.arguments }}",
}


@pytest.mark.parametrize("form", FORMS)
def test_tools(form):
    """Earlier calls and their results, as objects or as text, whichever the template takes."""
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{% set call = c.function %}{{ call.name }}"
        + FORMS[form]
        + "{% endfor %}{% endfor %}"
    )
    shown = ChatTemplate(template, {}).render(CALLS, {}, TOOLS)
    calls = {"glm": "<arg_key>a</arg_key><arg_value>1</arg_value>", "deepseek": '<｜tool▁sep｜>{"a": 1}'}
    assert shown == json.dumps(TOOLS) + f"<user>1 + 1?<assistant>add{calls[form]}<tool>2"
    assert ChatTemplate(template, {}).render(CALLS[:1], {}) == "<user>1 + 1?"


def test_values_too_deep_for_the_template():
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidArgument, match="messages: the chat template refuses them: "):
        ChatTemplate("{{ deep | tojson }}", {}).render([{"role": "user", "content": "x"}], {"deep": deep})


def test_refusals_of_the_template():
    for source in ("{{ raise_exception('not two') }}", "{{ nothing.at.all }}", "{{ 1 / 0 }}", "{{ messages[0] + 1 }}"):
        with pytest.raises(InvalidArgument, match="the chat template refuses them: ") as caught:
            ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], {})
        assert str(caught.value).startswith("messages: ")
    for name in ("messages", "add_generation_prompt", "tools", "bos_token"):
        with pytest.raises(InvalidArgument) as caught:
            ChatTemplate("", {"bos_token": "a"}).render([{"role": "user", "content": "x"}], {name: 1})
        assert str(caught.value).startswith(f"chat_template_kwargs.{name}: got 1; allowed: ")

"""The gateway's page in a browser: the tokens that a person sees are the server's, in the colours of their origin."""

import asyncio
import json

import pytest
from mtp_client import Client

from server.browser import CHROMIUM, running_browser
from server.helpers import PROMPTS
from server.running import wait_for

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome to show the page"
)
SIZES = [(1280, 800), (390, 844)]


async def generate(browser, **values):
    """Fills the form, sends it and waits for the end."""
    for name, value in values.items():
        await browser.get(f"document.getElementById({json.dumps(name)}).value = {json.dumps(str(value))}")
    await browser.get("document.getElementById('generate').click()")
    await browser.until("document.body.dataset.state == 'idle'")


async def shown(browser):
    """The tokens on the page: their texts, which were accepted drafts, and the figures above them."""
    tokens = "[...document.querySelectorAll('#text .token')]"
    names = ["acceptance", "drafts", "per_step", "count", "state", "error"]
    return {
        "texts": await browser.get(f"{tokens}.map((token) => token.textContent)"),
        "accepted": await browser.get(f"{tokens}.map((token) => token.classList.contains('accepted'))"),
        "prompt": await browser.get("document.querySelector('#text .prompt')?.textContent"),
        **{name: await browser.get(f"document.getElementById('{name}').textContent") for name in names},
    }


def expected(sdk, prompt, **params):
    """The same from the SDK's stream: each chunk is a verify step, its accepted drafts first."""
    chunks = list(sdk.stream(prompt, **params))
    accepted, before = [], 0
    for chunk in chunks:
        new = chunk.num_accepted_draft_tokens - before
        before = chunk.num_accepted_draft_tokens
        accepted += [index < new for index in range(len(chunk.token_ids))]
    offsets = [start for chunk in chunks for start in chunk.text_offsets]
    text = "".join(chunk.text for chunk in chunks)
    last = chunks[-1]
    return {
        "texts": [text[start:end] for start, end in zip(offsets, [*offsets[1:], None], strict=True)],
        "accepted": accepted,
        "acceptance": f"{last.acceptance_rate:.0%}".replace("%", " %"),
        "drafts": f"{last.num_accepted_draft_tokens} of {last.num_draft_tokens} drafts",
        "per_step": f"{last.num_output_tokens / len(chunks):.2f}",
        "count": str(last.num_output_tokens),
        "error": "",
    }


def test_page(gateway, triton_server, tmp_path):
    async def run(sdk):
        async with running_browser(tmp_path / "profile") as browser:
            for size in SIZES:
                await browser.open(gateway, *size)
                await browser.until("document.getElementById('model').textContent == 'deepseek-demo'")
                await generate(browser, prompt=PROMPTS[2], max_tokens=64, temperature=0, seed="")
                wanted = expected(sdk, PROMPTS[2], max_tokens=64)
                found = await shown(browser)
                assert found | wanted == found and found["prompt"] == PROMPTS[2]
                assert any(wanted["accepted"]) and not all(wanted["accepted"])
                assert await browser.get("document.documentElement.scrollWidth") == size[0]
                await browser.screenshot(tmp_path / f"{size[0]}.png")

            # Characters of several tokens, and a chat.
            odd = {"prompt": "🙂 \u2028 世界", "max_tokens": 60, "temperature": 100, "seed": 1}
            await generate(browser, **odd)
            wanted, found = expected(sdk, odd.pop("prompt"), **odd), await shown(browser)
            assert found | wanted == found and "" in wanted["texts"]
            await browser.get("document.querySelector('input[value=chat]').click()")
            await generate(browser, prompt="Speak!", max_tokens=5, temperature=0, seed="")
            prompt = "<｜begin▁of▁sentence｜><｜User｜>Speak!<｜Assistant｜>"
            wanted, found = expected(sdk, prompt, max_tokens=5, add_special_tokens=False), await shown(browser)
            assert found | wanted == found and found["prompt"] == ""
            assert browser.complaints == []

            # Errors are shown, and Stop stops.
            await browser.get("document.querySelector('input[value=completions]').click()")
            await generate(browser, prompt="")
            assert (await shown(browser))["error"] == "prompt: got ''; allowed: a text of at least 1 character"
            await browser.get("document.getElementById('prompt').value = 'In the beginning'")
            await browser.get("document.getElementById('max_tokens').value = 4000")
            await browser.get("document.getElementById('generate').click()")
            await browser.until("document.querySelectorAll('#text .token').length > 3")
            await browser.get("document.getElementById('stop').click()")
            await browser.until("document.body.dataset.state == 'idle'")
            stopped = await shown(browser)
            assert (stopped["state"], stopped["error"]) == ("tokens, stopped", "")

    with Client(triton_server.grpc_url) as sdk:
        asyncio.run(run(sdk))
    wait_for(lambda: triton_server.engine_load() < 0.1, 10, "an idle engine")

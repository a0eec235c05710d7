"use strict";

// Shows a streamed answer token by token. All figures of speculation are the server's: each event
// is one verify step with its tokens, the accepted drafts first, and where their texts start.

const $ = (id) => document.getElementById(id);
const MAX_BARS = 120;
let model = null;
let running = null; // AbortController of the request in progress

/** The text so far and its tokens. */
class Output {
  constructor(prompt) {
    this.characters = []; // by code point, as the offsets count
    this.tokens = []; // {start, span}
    this.open = 0; // the first token whose text may still grow
    this.steps = 0;
    this.drafted = 0;
    this.accepted = 0;
    const shown = document.createElement("span");
    shown.className = "prompt";
    shown.textContent = prompt;
    $("text").replaceChildren(shown);
    $("bars").replaceChildren();
  }

  add(run) {
    const at = performance.now();
    const fresh = run.token_ids.length;
    this.steps += 1;
    this.drafted += run.num_draft_tokens;
    this.accepted += run.num_accepted_draft_tokens;
    this.characters.push(...run.text);
    run.token_ids.forEach((id, index) => {
      const accepted = index < run.num_accepted_draft_tokens;
      const span = document.createElement("span");
      span.className = accepted ? "token accepted" : "token target";
      const origin = accepted ? `draft ${index + 1} of ${run.num_draft_tokens}, accepted` : "drawn by the main network";
      span.title = `token ${id} · step ${this.steps} · ${origin}`;
      this.tokens.push({ start: run.text_offsets[index], span });
    });
    if (this.first === undefined) {
      this.first = { at, tokens: fresh };
    }
    this.last = at;
    this.showText();
    this.showBar(run);
    this.showFigures();
  }

  showText() {
    const box = $("text");
    const follow = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    const received = this.characters.length;
    let open = this.tokens.length;
    for (let index = this.open; index < this.tokens.length; index++) {
      const { start, span } = this.tokens[index];
      const next = this.tokens[index + 1];
      const end = next === undefined ? received : next.start;
      span.textContent = this.characters.slice(start, end).join("");
      if (!span.isConnected) box.append(span);
      if ((next === undefined || end > received) && open === this.tokens.length) open = index;
    }
    this.open = open;
    if (follow) box.scrollTop = box.scrollHeight;
  }

  showBar(run) {
    const column = document.createElement("span");
    const rejected = run.num_draft_tokens - run.num_accepted_draft_tokens;
    const own = run.token_ids.length - run.num_accepted_draft_tokens;
    const kinds = { target: own, rejected, accepted: run.num_accepted_draft_tokens };
    this.tallest = Math.max(this.tallest ?? 1, run.num_draft_tokens + 1);
    for (const [kind, count] of Object.entries(kinds)) {
      for (let part = 0; part < count; part++) {
        const block = document.createElement("i");
        block.className = kind;
        column.append(block);
      }
    }
    $("bars").append(column);
    if ($("bars").childElementCount > MAX_BARS) $("bars").firstElementChild.remove();
    $("bars").style.setProperty("--tallest", this.tallest);
  }

  showFigures() {
    const count = this.tokens.length;
    $("count").textContent = count;
    $("per_step").textContent = (count / this.steps).toFixed(2);
    if (this.drafted) {
      $("acceptance").textContent = `${Math.round((100 * this.accepted) / this.drafted)} %`;
      $("drafts").textContent = `${this.accepted} of ${this.drafted} drafts`;
    }
    const seconds = (this.last - this.first.at) / 1000;
    if (seconds > 0) $("speed").textContent = ((count - this.first.tokens) / seconds).toFixed(1);
  }
}

function headers() {
  const key = $("api_key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** The answer of the gateway; throws its error message. */
async function call(path, options) {
  const response = await fetch(path, { headers: headers(), ...options });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `HTTP ${response.status}`);
  }
  return response;
}

async function findModel() {
  const list = await (await call("v1/models")).json();
  model = list.data[0].id;
  $("model").textContent = model;
}

function request(mode, prompt) {
  const body = {
    model,
    stream: true,
    return_speculation: true,
    max_tokens: $("max_tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
  };
  if ($("seed").value) body.seed = $("seed").valueAsNumber;
  if (mode === "chat") return { ...body, messages: [{ role: "user", content: prompt }] };
  return { ...body, prompt };
}

/** The events of a stream, parsed. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

async function generate() {
  const mode = document.querySelector("input[name=mode]:checked").value;
  const prompt = $("prompt").value;
  if (model === null) await findModel();
  const path = mode === "chat" ? "v1/chat/completions" : "v1/completions";
  const body = JSON.stringify(request(mode, prompt));
  const response = await call(path, { method: "POST", body, signal: running.signal });
  const output = new Output(mode === "chat" ? "" : prompt);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    output.add(choice.speculation);
    if (choice.finish_reason) $("state").textContent = choice.finish_reason === "stop" ? "tokens, to the end" : "tokens, all asked for";
  }
}

function show(error) {
  $("error").hidden = error === null;
  $("error").textContent = error ?? "";
}

function setRunning(controller) {
  running = controller;
  $("generate").disabled = controller !== null;
  $("stop").disabled = controller === null;
  document.body.dataset.state = controller === null ? "idle" : "running";
}

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  show(null);
  for (const id of ["acceptance", "speed", "per_step", "count"]) $(id).textContent = "–";
  $("drafts").textContent = "accepted of drafted";
  $("state").textContent = "tokens";
  setRunning(new AbortController());
  try {
    await generate();
  } catch (error) {
    if (error.name === "AbortError") $("state").textContent = "tokens, stopped";
    else show(error.message);
  }
  setRunning(null);
});

$("stop").addEventListener("click", () => running.abort());

$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});

findModel().catch((error) => {
  $("model").textContent = "";
  show(error.message);
});

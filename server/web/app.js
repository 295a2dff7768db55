// The playground: one conversation with this server over its public API. Text is only ever set as text, never as HTML.
// Addresses are relative to the page's: a proxy may have the server under a path of its own.

import { described as file, inFrontOf, putBack, take } from "./attachments.js";

const $ = (id) => document.getElementById(id);
const messages = [];
let apiKey = sessionStorage.getItem("longwave-key") ?? "";
let running = null; // AbortController of the answer being written
let connecting = false;
let conversation = 0; // counts up when a new one begins, so that an old answer cannot end up in it

function headers() {
  return { "content-type": "application/json", ...(apiKey ? { authorization: `Bearer ${apiKey}` } : {}) };
}

// Whether one was given; Escape gives none.
function askForKey() {
  const dialog = $("key-dialog");
  $("key-refused").hidden = apiKey === "";
  $("key").value = dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "use";
      apiKey = given ? $("key").value.trim() : "";
      sessionStorage.setItem("longwave-key", apiKey);
      resolve(given);
    }, { once: true });
  });
}

// A request that asks for the key as often as the server refuses it.
async function call(path, options = {}) {
  for (;;) {
    const reply = await fetch(path, { ...options, headers: headers() });
    if (reply.status !== 401) return reply;
    if (!(await askForKey())) throw new Error("This server asks for an API key: reload the page to give one.");
  }
}

// `retryAfter`, in seconds: of a server, or of a proxy before it, that can answer later.
async function failure(reply) {
  const body = await reply.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `The server replied ${reply.status}.`);
  if ([502, 503, 504].includes(reply.status)) error.retryAfter = Number(reply.headers.get("retry-after")) || 2;
  error.modelGone = body?.error?.code === "model_not_found";
  return error;
}

// A TypeError is fetch's word for a server that cannot be reached.
function described(error) {
  return error instanceof TypeError ? "The server cannot be reached." : error.message.replace(/ Try again later\.$/, "");
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal?.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
  });
}

// Until the server is ready, or has refused for good; at any time again, for a server may have been restarted.
async function connect() {
  if (connecting) return;
  connecting = true;
  for (let wait = 0; wait !== null;) {
    await pause(wait);
    wait = await look();
  }
  connecting = false;
}

// Shows what the server is; returns after how many seconds to look again, null for never.
async function look() {
  try {
    return (await showModels()) ? null : 1;
  } catch (error) {
    const wait = error instanceof TypeError ? 2 : error.retryAfter ?? null;
    $("status").textContent = described(error) + (wait === null ? "" : " Trying again…");
    return wait;
  }
}

// Returns whether they are loaded.
async function showModels(signal) {
  const reply = await call("v1/models", { signal });
  if (!reply.ok) throw await failure(reply);
  const { data } = await reply.json();
  const chosen = $("model").value;
  $("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === chosen)));
  const length = data[0].max_model_len;
  $("status").textContent = length ? `Ready. Up to ${length.toLocaleString()} tokens.` : "The model is loading…";
  return Boolean(length);
}

function addTurn(who, text) {
  const turn = document.createElement("div");
  turn.className = `turn ${who}`;
  turn.dataset.who = who;
  turn.textContent = text;
  $("conversation").append(turn);
  return turn;
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The answer broke off.");
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue; // a ping
      const data = part.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function request() {
  const system = $("system").value.trim();
  const maxTokens = $("max-tokens").valueAsNumber;
  return {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: $("temperature").valueAsNumber || 0,
    ...(Number.isNaN(maxTokens) ? {} : { max_tokens: maxTokens }), // what is none is the server's to refuse
    stream: true,
    stream_options: { include_usage: true },
  };
}

// A reply to the conversation, which waits for a server that is starting, busy or restarting.
async function answer() {
  const { signal } = running;
  for (;;) {
    try {
      if (!$("model").value && !(await showModels(signal))) connect(); // nobody had given a key
      const body = JSON.stringify(request());
      const reply = await call("v1/chat/completions", { method: "POST", body, signal });
      if (reply.ok) return reply;
      throw await failure(reply);
    } catch (error) {
      if (!error.retryAfter) throw error;
      $("measures").textContent = `${described(error)} Trying again…`;
      await pause(error.retryAfter, signal);
      $("measures").textContent = "";
    }
  }
}

// Writes the answer into `turn` and returns its text; what arrived before a stop or a failure counts.
async function write(turn, log) {
  const start = performance.now();
  let first = null;
  let usage = null;
  let reason = null;
  for await (const event of events(await answer())) {
    usage = event.usage ?? usage;
    reason = event.choices[0]?.finish_reason ?? reason;
    const piece = event.choices[0]?.delta.content;
    if (!piece) continue;
    first ??= performance.now();
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    turn.append(piece);
    if (atEnd) log.scrollTop = log.scrollHeight;
  }
  showMeasures(start, first, usage, reason);
}

function showMeasures(start, first, usage, reason) {
  if (first === null || usage === null) return;
  const tokens = usage.completion_tokens;
  const rate = tokens > 1 ? (tokens - 1) / ((performance.now() - first) / 1000) : 0;
  const cached = usage.prompt_tokens_details.cached_tokens;
  $("measures").textContent =
    `First token after ${((first - start) / 1000).toFixed(2)} s · ${rate.toFixed(1)} tokens/s · ` +
    `${usage.prompt_tokens} prompt tokens (${cached} cached), ${tokens} generated` +
    (reason === "length" ? " · cut off: no tokens left" : "");
}

async function send(text) {
  const mine = conversation;
  for (const old of document.querySelectorAll(".turn.failed")) old.remove();
  const files = take();
  messages.push({ role: "user", content: inFrontOf(text, files) });
  const question = addTurn("user", [...files.map(file), text].join("\n"));
  const turn = addTurn("assistant", "");
  const log = $("conversation");
  log.scrollTop = log.scrollHeight;
  running = new AbortController();
  $("measures").textContent = "";
  setRunning(true);
  let failed = null;
  let stopped = false;
  try {
    await write(turn, log);
  } catch (error) {
    stopped = error.name === "AbortError";
    failed = stopped ? null : error;
  }
  setRunning(false);
  if (mine !== conversation) return;
  if (turn.textContent) {
    messages.push({ role: "assistant", content: turn.textContent });
  } else { // nothing was answered: the question goes back to where it can be changed and sent again
    messages.pop();
    turn.remove();
    question.remove();
    $("message").value ||= text;
    putBack(files);
  }
  if (failed instanceof TypeError || failed?.modelGone) connect();
  if (failed) addTurn("failed", described(failed)).scrollIntoView({ block: "nearest" });
  else if (stopped) $("measures").textContent = "Stopped.";
  else if (!turn.textContent) $("measures").textContent = "The model answered nothing.";
}

function setRunning(yes) {
  $("send").hidden = yes;
  $("stop").hidden = !yes;
  $("conversation").ariaBusy = String(yes);
  if (!yes) { running = null; $("message").focus(); }
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || running) return;
  $("message").value = "";
  send(text);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) running?.abort();
});
$("clear").addEventListener("click", () => {
  running?.abort();
  conversation += 1;
  messages.length = 0;
  $("conversation").replaceChildren();
  $("measures").textContent = "";
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark"
    || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("longwave-theme", document.documentElement.dataset.theme);
});

const theme = localStorage.getItem("longwave-theme");
if (theme) document.documentElement.dataset.theme = theme;
connect();

// The page at / of a router: a chat over /v1/chat/completions, and what /status says. No build step, no library.
// Text of models, servers and people is only ever set as text, never as markup.

const POLL_MS = 2000;
const PATIENCE_MS = 5000; // for an answer of /status
const TRACE = 60; // points of the curve: two minutes

const $ = (id) => document.getElementById(id);
const history = []; // messages of the conversation, as the API takes them
let running = null; // AbortController of the answer that is being written

const make = (name, text, className) => {
  const element = document.createElement(name);
  if (text) element.textContent = text;
  if (className) element.className = className;
  return element;
};
const clone = (id) => $(id).content.firstElementChild.cloneNode(true);
const authorization = () => ($("key").value ? { Authorization: `Bearer ${$("key").value}` } : {});

class ApiError extends Error {
  constructor(status, error) {
    super(error?.message || `The server answered ${status}.`);
    this.status = status;
    this.detail = [status && `HTTP ${status}`, error?.stage, error?.attempt].filter(Boolean).join(" · ");
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  return new ApiError(response.status, body?.error);
}

// ---- Chat ---------------------------------------------------------------------------------------------------------

async function* chunksOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, { message: "The answer broke off: the connection ended before it did." });
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(0, chunk.error);
      yield chunk;
    }
  }
}

function body() {
  const system = $("system").value.trim();
  const request = {
    model: $("model").value,
    messages: system ? [{ role: "system", content: system }, ...history] : history,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  if ($("temperature").value) request.temperature = Number($("temperature").value);
  if ($("tokens").value) request.max_tokens = Number($("tokens").value);
  return JSON.stringify(request);
}

/** One turn of the conversation on the page. Text is drawn once a frame, however fast it comes. */
class Turn {
  constructor(kind, name) {
    this.element = clone("turn");
    this.element.classList.add(kind);
    this.element.querySelector("h2").textContent = name;
    this.meta = this.element.querySelector(".meta");
    this.text = "";
    this.reasoning = "";
    $("empty").hidden = true;
    $("log").append(this.element);
    $("log").scrollTop = $("log").scrollHeight;
  }

  draw() {
    this.drawing ||= requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    const log = $("log");
    const below = log.scrollHeight - log.scrollTop - log.clientHeight;
    fill(this.element.querySelector(".said > .text"), this.text);
    const reasoning = this.element.querySelector(".reasoning");
    reasoning.hidden = !this.reasoning;
    reasoning.querySelector(".text").textContent = this.reasoning;
    if (below < 60) log.scrollTop = log.scrollHeight; // only for whoever reads the end
  }
}

/** Text as it is; what stands between fences of three backticks as a block of code. */
function fill(element, text) {
  const parts = text.split(/^```[^\n]*\n?/m);
  element.replaceChildren(
    ...parts.map((part, i) => {
      if (i % 2) return make("pre", part.replace(/\n$/, ""));
      const text = i ? part.replace(/^\n+/, "") : part; // a block has space of its own around it
      return document.createTextNode(i + 1 < parts.length ? text.replace(/\n+$/, "") : text);
    }),
  );
}

const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

function figures(times, usage) {
  const parts = [];
  if (times.first) parts.push(`first token ${number((times.first - times.sent) / 1000, 2)} s`);
  if (usage) {
    parts.push(`${number(usage.completion_tokens)} tokens`);
    const seconds = (times.last - times.first) / 1000;
    if (usage.completion_tokens > 1 && seconds > 0.1) parts.push(`${number((usage.completion_tokens - 1) / seconds, 1)}/s`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${number(usage.prompt_tokens)}${cached ? `, ${number(cached)} cached` : ""}`);
  }
  return parts.join(" · ");
}

async function answer() {
  const controller = (running = new AbortController());
  const turn = new Turn("model", "Model");
  turn.element.setAttribute("aria-busy", "true"); // read aloud when it is whole
  show("Answering …");
  const times = { sent: performance.now(), first: 0, last: 0 };
  let usage = null;
  let error = null;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...authorization() },
      body: body(),
      signal: controller.signal,
    });
    if (!response.ok) throw await refusal(response);
    for await (const chunk of chunksOf(response)) {
      const delta = chunk.choices[0]?.delta ?? {};
      if (delta.content || delta.reasoning_content) {
        times.last = performance.now();
        times.first ||= times.last;
        turn.text += delta.content ?? "";
        turn.reasoning += delta.reasoning_content ?? "";
        turn.draw();
      }
      usage = chunk.usage ?? usage;
      turn.meta.textContent = figures(times, usage);
    }
  } catch (caught) {
    error = caught;
  }
  running = null;
  turn.drawNow(); // before it is said to be whole
  turn.element.removeAttribute("aria-busy");
  if (turn.text) history.push({ role: "assistant", content: turn.text });
  const stopped = controller.signal.aborted;
  if (stopped) turn.meta.textContent = [figures(times, usage), "stopped"].filter(Boolean).join(" · ");
  else if (error) fail(turn, error);
  show(stopped ? "Stopped." : error ? "" : "Done.");
  $("prompt").focus();
}

function fail(turn, error) {
  const message = error instanceof ApiError ? error.message : "The service cannot be reached. Is it running?";
  const failure = make("div", "", "failure");
  failure.setAttribute("role", "alert");
  failure.append(make("p", message));
  turn.meta.before(failure);
  turn.meta.textContent = error.detail ?? String(error.message ?? error);
  if (error.status === 401) askForKey();
  if (turn.text) return;
  const again = make("button", "Try again");
  again.type = "button";
  again.addEventListener("click", () => {
    if (running) return;
    turn.element.remove();
    answer();
  });
  turn.meta.append(again);
}

function show(progress) {
  $("progress").textContent = progress;
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
}

function send() {
  const text = $("prompt").value.trim();
  if (running || !text) return;
  const turn = new Turn("person", "You");
  turn.text = text;
  turn.draw();
  turn.meta.remove();
  history.push({ role: "user", content: text });
  $("prompt").value = "";
  grow();
  answer();
}

function grow() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => {
  running?.abort();
  history.length = 0;
  $("log").replaceChildren($("empty"));
  $("empty").hidden = false;
  show("");
  $("prompt").focus();
});

// ---- Service ------------------------------------------------------------------------------------------------------

const ROLES = { prefill: "Prefill", decode: "Decode", unified: "Workers" };
const MODES = { direct: "Direct", store: "Store", memory: "Memory" };
const speeds = [];
let timer = 0;

function askForKey() {
  $("options").open = true;
  $("key").focus();
}

function setState(className, text) {
  const state = $("state");
  state.className = `state ${className}`;
  if (state.textContent !== text) state.textContent = text; // said aloud when it changes
}

function note(text) {
  $("notice").hidden = !text;
  $("notice").textContent = text;
}

const rate = (gigabytes) =>
  gigabytes >= 0.1 ? `${number(gigabytes, 2)} GB/s` : gigabytes > 0 ? `${number(gigabytes * 1000, 1)} MB/s` : "0 GB/s";

function drawRole(role) {
  const element = clone("role");
  element.querySelector("h3").textContent = ROLES[role.role] ?? role.role;
  element.querySelector(".ready").textContent = `${role.ready} of ${role.known} ready`;
  element.classList.toggle("short", role.ready < role.known || !role.known);
  const shown = role.kv_usage !== null;
  element.querySelector(".load").hidden = element.querySelector(".kv").hidden = !shown;
  if (shown) {
    element.querySelector(".load").textContent = `${role.running} running · ${role.waiting} queued`;
    const percent = number(role.kv_usage * 100, 1);
    element.querySelector(".kv .number").textContent = `${percent}%`;
    const meter = element.querySelector(".meter");
    meter.setAttribute("aria-label", `KV cache in use, ${role.role}, percent`);
    meter.setAttribute("aria-valuenow", percent);
    meter.classList.toggle("full", role.kv_usage > 0.95);
    meter.firstElementChild.style.width = `${percent}%`;
  }
  return element;
}

function drawStrait(transfer) {
  const element = clone("strait");
  const mode = transfer.mode.split(", ").map((name) => MODES[name] ?? name).join(", ");
  element.querySelector(".path").textContent = [mode, transfer.transport.toUpperCase()].filter(Boolean).join(" · ");
  const moving = transfer.moving_gb_per_s;
  element.querySelector(".now").textContent = moving === null ? "" : `now  ${rate(moving)}`;
  element.querySelector(".channel").classList.toggle("moving", moving > 0);
  const link = transfer.link_gb_per_s;
  element.querySelector(".link").textContent = link ? `link ${rate(link)}` : "link not measured";
  return element;
}

function drawTrace() {
  const most = Math.max(1, ...speeds);
  const points = speeds.map((value, i) => `${120 - (speeds.length - 1 - i) * (120 / (TRACE - 1))},${27 - (25 * value) / most}`);
  $("trace").firstElementChild.setAttribute("points", points.join(" "));
}

function draw(status) {
  setState(status.ready ? "ready" : "lacking", status.ready ? "Ready" : "Not ready");
  note(status.ready ? "" : `${status.reason.charAt(0).toUpperCase()}${status.reason.slice(1)}.`);
  const models = $("model");
  if ([...models.options].map((o) => o.value).join() !== status.models.join()) {
    models.replaceChildren(...status.models.map((name) => new Option(name, name)));
    models.disabled = status.models.length < 2;
    $("curl").textContent =
      `curl ${new URL("v1/chat/completions", location)} \\\n  -H 'Content-Type: application/json' \\\n` +
      // Within a shell's single quotes, a quote ends them, stands escaped, and begins them again.
      `  -d '${JSON.stringify({ model: status.models[0], messages: [{ role: "user", content: "Hello" }] }).replaceAll("'", "'\\''")}'`;
  }
  const shared = status.tokens_per_s === null;
  document.querySelector(".speed").hidden = shared;
  if (!shared) {
    speeds.push(status.tokens_per_s);
    if (speeds.length > TRACE) speeds.shift();
    $("speed").textContent = number(status.tokens_per_s, status.tokens_per_s < 100 ? 1 : 0);
    drawTrace();
  }
  const parts = status.roles.map(drawRole);
  if (status.transfer) parts.splice(1, 0, drawStrait(status.transfer));
  $("roles").replaceChildren(...parts);
  const facts = [
    ["Context", status.max_model_len ? `${number(status.max_model_len)} tokens` : "unknown"],
    ["Isthmus", status.version],
  ];
  $("facts").replaceChildren(...facts.flatMap(([name, value]) => [make("dt", name), make("dd", value, "number")]));
  const ready = status.roles.map((role) => `${role.ready}/${role.known}`).join(" → ");
  $("brief").textContent = shared ? ready : `${ready} · ${number(status.tokens_per_s, 1)} tok/s`;
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const signal = AbortSignal.timeout(PATIENCE_MS);
    const response = await fetch("status", { headers: authorization(), cache: "no-store", signal });
    if (!response.ok) throw await refusal(response);
    draw(await response.json());
  } catch (error) {
    if (error.status === 401) {
      setState("lacking", "Key needed");
      note("This service asks for an API key: see Options.");
      return; // asked again when there is another key
    }
    setState("lacking", "No contact");
    note("The service does not answer. Trying again.");
  }
  timer = setTimeout(poll, POLL_MS);
}

document.addEventListener("visibilitychange", poll);
$("key").addEventListener("change", poll);

const narrow = matchMedia("(max-width: 860px)");
const fold = () => ($("service").open = !narrow.matches);
narrow.addEventListener("change", fold);
fold();
poll();
$("prompt").focus({ preventScroll: true });

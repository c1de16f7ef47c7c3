"use strict";

// ---- talking to the server -----------------------------------------------------------------------

const byId = (id) => document.getElementById(id);

const KEY = "steppe-key";

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}`, ...more } : { ...more };
}

async function call(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (response.status === 401) {
    byId("key-form").hidden = false;
  }
  return response;
}

async function complaint(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  describeModel();
  poll();
});

// ---- the chat ------------------------------------------------------------------------------------

const model = { known: false, chat: true };
let conversation = [];
let running = null;

async function describeModel() {
  const response = await call("v1/models");
  if (!response.ok) {
    return;
  }
  const card = (await response.json()).data[0];
  model.known = true;
  model.chat = card.chat;
  byId("model").textContent = card.id;
  byId("model").title = `${card.id}, context of ${card.max_model_len} tokens`;
  document.title = `${card.id}: Steppe`;
  for (const input of document.querySelectorAll("[data-field]")) {
    const own = card.generation_defaults[input.dataset.field];
    if (own !== undefined) {
      input.placeholder = `${own} (model)`;
    }
  }
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) {
    made.className = className;
  }
  if (text !== undefined) {
    made.textContent = text;
  }
  return made;
}

function addMessage(role, content) {
  byId("welcome")?.remove();
  const message = element("div", `message ${role}`);
  message.text = message.appendChild(element("div", "text", content));
  message.note = message.appendChild(element("div", "note"));
  byId("messages").append(message);
  message.scrollIntoView({ block: "end" });
  return message;
}

function samplingFields() {
  const fields = {};
  for (const input of document.querySelectorAll("[data-field]")) {
    if (input.value !== "" && Number.isFinite(input.valueAsNumber)) {
      fields[input.dataset.field] = input.valueAsNumber;
    }
  }
  return fields;
}

async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) {
      return;
    }
    pending += value;
    const blocks = pending.split("\n\n");
    pending = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith("data: ")) {
        yield block.slice(6);
      }
    }
  }
}

function question(text) {
  const common = { stream: true, stream_options: { include_usage: true }, ...samplingFields() };
  if (!model.chat) {
    return ["v1/completions", { prompt: text, ...common }];
  }
  const system = byId("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  messages.push(...conversation, { role: "user", content: text });
  return ["v1/chat/completions", { messages, ...common }];
}

async function ask(text) {
  const [path, body] = question(text);
  addMessage("user", text);
  const message = addMessage("assistant", "");
  message.classList.add("busy");
  byId("messages").setAttribute("aria-busy", "true");
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").hidden = false;
  const began = performance.now();
  const seen = { first: null, last: null, finish: null, usage: null, error: null, text: "" };
  try {
    const response = await call(path, {
      method: "POST",
      body: JSON.stringify(body),
      headers: { "content-type": "application/json" },
      signal: running.signal,
    });
    if (!response.ok) {
      throw new Error(await complaint(response));
    }
    for await (const data of serverEvents(response)) {
      if (data === "[DONE]") {
        break;
      }
      take(JSON.parse(data), seen, message);
    }
  } catch (error) {
    seen.error = error.name === "AbortError" ? "stopped" : error.message;
  }
  running = null;
  message.classList.remove("busy");
  byId("messages").setAttribute("aria-busy", "false");
  byId("send").disabled = false;
  byId("stop").hidden = true;
  message.note.textContent = remark(seen, began);
  message.note.classList.toggle("bad", Boolean(seen.error) && seen.error !== "stopped");
  if (seen.text) {
    conversation.push({ role: "user", content: text }, { role: "assistant", content: seen.text });
  } else if (seen.error) {
    byId("prompt").value ||= text;
  }
}

function take(event, seen, message) {
  if (event.error) {
    seen.error = event.error.message;
    return;
  }
  seen.usage = event.usage ?? seen.usage;
  for (const choice of event.choices) {
    const text = choice.delta ? choice.delta.content : choice.text;
    seen.finish = choice.finish_reason ?? seen.finish;
    if (text) {
      seen.first ??= performance.now();
      seen.last = performance.now();
      seen.text += text;
      const list = byId("messages");
      const follow = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
      message.text.append(text);
      if (follow) {
        list.scrollTop = list.scrollHeight;
      }
    }
  }
}

function remark(seen, began) {
  const parts = [];
  if (seen.usage) {
    parts.push(`${seen.usage.completion_tokens} tokens`);
    const cached = seen.usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${seen.usage.prompt_tokens}${cached ? `, ${cached} of it cached` : ""}`);
  }
  if (seen.first !== null) {
    parts.push(`first after ${seconds((seen.first - began) / 1000)}`);
    const tokens = seen.usage?.completion_tokens ?? 0;
    if (tokens > 1 && seen.last > seen.first) {
      parts.push(`${((1000 * (tokens - 1)) / (seen.last - seen.first)).toFixed(1)} tokens/s`);
    }
  }
  if (seen.finish === "length") {
    parts.push("cut at the token limit");
  }
  if (seen.error) {
    parts.push(seen.error);
  }
  return parts.join(" · ");
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (text && !running) {
    byId("prompt").value = "";
    ask(text);
  }
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  byId("messages").replaceChildren();
  byId("prompt").focus();
});

// ---- what the engine did -------------------------------------------------------------------------

const EVERY = 400;
const WINDOW = 60;
const COLUMNS = 400;

const engine = {};

function forget() {
  Object.assign(engine, {
    last: 0,
    now: 0,
    columns: [],
    lanes: new Map(),
    work: new Map(),
    ends: new Map(),
    counted: [],
    plots: { rate: [], first: [], between: [], cache: [] },
  });
}
forget();

/** Take a poll's answer in: steps become columns of cells, and points of the plots. */
function learn(answer) {
  if (answer.counters.steps < engine.last || answer.now < engine.now) {
    forget(); // another engine answers on this address now
  }
  engine.now = answer.now;
  engine.answer = answer;
  const live = new Set(answer.live.map((one) => one.id));
  const lastOf = new Map();
  answer.steps.forEach((step, index) => {
    for (const id of participants(step)) {
      lastOf.set(id, index);
    }
  });
  const leaving = new Map();
  for (const id of engine.lanes.keys()) {
    if (!live.has(id) && !lastOf.has(id)) {
      engine.lanes.delete(id);
    }
  }
  for (const [id, index] of lastOf) {
    if (!live.has(id)) {
      leaving.set(index, [...(leaving.get(index) ?? []), id]);
    }
  }
  answer.steps.forEach((step, index) => {
    learnStep(step, answer);
    for (const id of leaving.get(index) ?? []) {
      for (const map of [engine.lanes, engine.work, engine.ends]) {
        map.delete(id);
      }
    }
    engine.last = step.number;
  });
  engine.columns.splice(0, engine.columns.length - COLUMNS);
  learnRate(answer);
  for (const points of Object.values(engine.plots)) {
    while (points.length && points[0][0] < engine.now - WINDOW) {
      points.shift();
    }
  }
}

function participants(step) {
  return [...step.prefills.map(([id]) => id), ...step.decodes];
}

function learnStep(step, answer) {
  const end = step.began + step.seconds;
  const cells = [];
  for (const [id, tokens] of step.prefills) {
    const done = engine.work.get(id)?.prompt ?? 0;
    engine.work.set(id, { kind: "prefill", prompt: done + tokens });
    cells.push({ id, lane: laneOf(id), kind: "prefill", tokens });
  }
  let gap = 0;
  for (const id of step.decodes) {
    engine.work.set(id, { ...engine.work.get(id), kind: "decode" });
    cells.push({ id, lane: laneOf(id), kind: "decode", tokens: 1 });
    if (engine.ends.has(id)) {
      gap = Math.max(gap, end - engine.ends.get(id));
    }
  }
  for (const id of participants(step)) {
    engine.ends.set(id, end);
  }
  engine.columns.push({ step, cells });
  for (const [, waited] of step.first_tokens) {
    engine.plots.first.push([end, waited]);
  }
  if (gap) {
    engine.plots.between.push([end, gap]);
  }
  if (step.free_pages !== null && answer.cache_tokens) {
    const free = step.free_pages * step.page_size;
    engine.plots.cache.push([end, Math.max(0, 1 - free / answer.cache_tokens)]);
  }
}

function laneOf(id) {
  if (!engine.lanes.has(id)) {
    const taken = new Set(engine.lanes.values());
    let lane = 0;
    while (taken.has(lane)) {
      lane += 1;
    }
    engine.lanes.set(id, lane);
  }
  return engine.lanes.get(id);
}

function learnRate(answer) {
  const counted = engine.counted;
  counted.push([answer.now, answer.counters.tokens]);
  while (counted.length > 2 && counted[1][0] < answer.now - 2) {
    counted.shift();
  }
  const [then, before] = counted[0];
  if (answer.now > then) {
    engine.plots.rate.push([answer.now, (answer.counters.tokens - before) / (answer.now - then)]);
  }
}

// ---- how it is shown -----------------------------------------------------------------------------

function seconds(value) {
  if (value < 0.00095) {
    return `${Math.round(value * 1e6)} µs`;
  }
  if (value < 0.9995) {
    return `${Number((value * 1000).toPrecision(3))} ms`;
  }
  return `${Number(value.toFixed(value < 10 ? 2 : 0))} s`;
}

const number = (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));
const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;

function middle(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : null;
}

function show() {
  const answer = engine.answer;
  const { counters } = answer;
  const recent = engine.columns.slice(-50).map((column) => column.step.seconds);
  const rate = engine.plots.rate.at(-1)?.[1] ?? 0;
  byId("state").textContent = answer.cause ? `${answer.state}: ${answer.cause}` : answer.state;
  byId("state").dataset.ok = String(answer.ok);
  byId("n-rate").textContent = number(rate);
  byId("n-seats").textContent = `${answer.resident}/${answer.seats}`;
  byId("n-queue").textContent = answer.live.filter((one) => one.seat === null).length;
  byId("n-step").textContent = recent.length ? seconds(middle(recent)) : "–";
  const { cache } = answer;
  byId("n-reused").textContent = cache ? percent(cache.hit_rate) : "–";
  byId("n-reused").title = cache
    ? `Of the prompts' tokens, those found computed. ${cache.cached_pages} of ${cache.total_pages} ` +
      `pages are cached, ${cache.evicted_pages} were evicted, ${counters.preemptions} preemptions`
    : "";
  byId("n-done").textContent = counters.completed.toLocaleString("en");
  const failed = counters.failed ? `, ${counters.failed} failed` : "";
  byId("n-lost").textContent = `${counters.cancelled}${failed}`;
  showReplicas(answer.replicas ?? []);
  showRequests(answer);
  draw();
}

/** A row for each of several engines: its places as a bar, and what became of its requests. */
function showReplicas(replicas) {
  byId("replicas-box").hidden = replicas.length === 0;
  byId("replicas").replaceChildren(
    ...replicas.map((one) => {
      const row = element("li", one.in_rotation ? "decode" : "prefill");
      const bar = document.createElement("progress");
      bar.max = 1;
      bar.value = one.load;
      bar.setAttribute("aria-label", `Load of replica ${one.name}`);
      const starts = one.generation > 1 ? `, start ${one.generation}` : "";
      const cause = one.cause && !one.in_rotation ? `: ${one.cause}` : "";
      row.append(
        element("span", "", one.name),
        bar,
        element(
          "span",
          "quiet",
          `${one.state}${starts}${cause}, ${one.in_flight}/${one.max_concurrent}, ` +
            `${one.completed.toLocaleString("en")} completed` +
            `${one.failed ? `, ${one.failed} failed` : ""}${reuse(one)}`,
        ),
      );
      return row;
    }),
  );
}

/** What a replica's cache spares it, and how full it is. */
function reuse({ cache, preemptions }) {
  if (!cache) return "";
  const held = percent(cache.leased_pages / cache.total_pages || 0);
  return (
    `, ${percent(cache.hit_rate)} reused, cache ${held} in use, ${cache.cached_pages} pages cached` +
    `${cache.evicted_pages ? `, ${cache.evicted_pages} evicted` : ""}` +
    `${preemptions ? `, ${preemptions} preempted` : ""}`
  );
}

function showRequests(answer) {
  const seated = answer.live.filter((one) => one.seat !== null).sort((a, b) => a.seat - b.seat);
  const waiting = answer.live.filter((one) => one.seat === null);
  fill(byId("seats"), seated, seatText);
  byId("no-seats").hidden = seated.length > 0;
  const taken = new Map(seated.map((one) => [one.seat, one.id]));
  byId("strip").replaceChildren(
    ...Array.from({ length: Math.min(answer.seats, 256) }, (_, seat) =>
      element("i", taken.has(seat) ? kindOf(taken.get(seat)) : ""),
    ),
  );
  byId("queue-box").hidden = waiting.length === 0;
  fill(byId("queue"), waiting.slice(0, 20), (one) => `waits ${seconds(one.age)}`);
  byId("queue-more").hidden = waiting.length <= 20;
  byId("queue-more").textContent = `and ${waiting.length - 20} more`;
}

const kindOf = (id) => engine.work.get(id)?.kind ?? "prefill";

function seatText(one) {
  const prompt = one.prompt_tokens ?? "?";
  if (!one.tokens) {
    const done = Math.min(engine.work.get(one.id)?.prompt ?? 0, one.prompt_tokens ?? 0);
    return `prompt ${done}/${prompt}`;
  }
  return `prompt ${prompt}, out ${one.tokens}${one.max_tokens ? `/${one.max_tokens}` : ""}`;
}

/** One row a sequence. Rows are kept, so that a button does not vanish from under a finger. */
function fill(list, sequences, text) {
  const rows = new Map([...list.children].map((row) => [Number(row.dataset.id), row]));
  for (const one of sequences) {
    const row = rows.get(one.id) ?? makeRow(one);
    rows.delete(one.id);
    row.className = one.tokens ? "decode" : "prefill";
    row.name.textContent = `${one.seat === null ? "" : `${one.seat}: `}#${one.id}`;
    const share = one.tokens
      ? one.tokens / (one.max_tokens ?? Math.max(256, one.tokens))
      : (engine.work.get(one.id)?.prompt ?? 0) / (one.prompt_tokens || 1);
    row.bar.value = Math.min(1, share);
    row.text.textContent = one.stopping ? "stopping" : text(one);
    row.button.disabled = one.stopping;
    list.append(row);
  }
  for (const row of rows.values()) {
    row.remove();
  }
}

function makeRow(one) {
  const row = element("li");
  row.dataset.id = one.id;
  row.name = row.appendChild(element("span"));
  row.bar = row.appendChild(element("progress"));
  row.bar.setAttribute("aria-label", `Progress of request ${one.request_id}`);
  row.text = row.appendChild(element("span", "quiet"));
  row.button = row.appendChild(element("button", "", "Cancel"));
  row.button.type = "button";
  row.button.setAttribute("aria-label", `Cancel request ${one.request_id}`);
  row.button.addEventListener("click", async () => {
    row.button.disabled = true;
    await call(`v1/engine/requests/${one.request_id}`, { method: "DELETE" });
    poll();
  });
  return row;
}

function paper(id) {
  const canvas = byId(id);
  const { width, height } = canvas.getBoundingClientRect();
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  return { pen, width, height };
}

function inks() {
  const style = getComputedStyle(document.documentElement);
  const ink = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    prefill: ink("prefill"),
    decode: ink("decode"),
    quiet: ink("quiet"),
    line: ink("line"),
    panel: ink("panel"),
  };
}

function draw() {
  if (!byId("timeline").getBoundingClientRect().width) {
    return; // the other tab is shown
  }
  const colours = inks();
  drawTimeline(colours);
  drawPlot("p-rate", "v-rate", engine.plots.rate, colours, { text: number, area: true });
  drawPlot("p-first", "v-first", engine.plots.first, colours, { text: seconds, dots: true });
  drawPlot("p-between", "v-between", engine.plots.between, colours, { text: seconds, dots: true });
  drawPlot("p-cache", "v-cache", engine.plots.cache, colours, { text: percent, area: true, top: 1 });
}

const CELL = 7;
let shownColumns = [];

/** A column a step, a row a request; below, how long each step took. */
function drawTimeline(colours) {
  const { pen, width, height } = paper("timeline");
  const count = Math.floor(width / CELL);
  shownColumns = engine.columns.slice(-count);
  const rows = Math.max(4, ...shownColumns.flatMap((one) => one.cells.map((cell) => cell.lane + 1)));
  const bars = 30;
  const tall = Math.min(16, (height - bars - 8) / rows);
  const longest = Math.max(1e-9, ...shownColumns.map((one) => one.step.seconds));
  pen.fillStyle = colours.line;
  pen.fillRect(0, height - bars - 4, width, 1);
  shownColumns.forEach(({ step, cells }, index) => {
    const x = (count - shownColumns.length + index) * CELL;
    for (const cell of cells) {
      pen.fillStyle = colours[cell.kind];
      pen.fillRect(x, cell.lane * tall, CELL - 1, Math.max(1, tall - 2));
    }
    pen.fillStyle = step.prefills.length ? colours.prefill : colours.decode;
    const bar = Math.max(1, (bars * step.seconds) / longest);
    pen.fillRect(x, height - bar, CELL - 1, bar);
  });
  if (shownColumns.length) {
    label(pen, seconds(longest), 0, height - bars + 8, colours);
  }
}

/** The next of 1, 2, 5, 10, 20, 50 and so on, up or down. */
function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 2, 5, 10].find((times) => times * unit >= value * 0.999);
}

/** Text that stays readable above what is drawn. */
function label(pen, text, x, y, colours) {
  pen.lineWidth = 3;
  pen.strokeStyle = colours.panel;
  pen.strokeText(text, x, y);
  pen.fillStyle = colours.quiet;
  pen.fillText(text, x, y);
}

function drawPlot(canvas, output, points, colours, { text, area, dots, top }) {
  const { pen, width, height } = paper(canvas);
  const most = top ?? roundUp(Math.max(...points.map(([, value]) => value), 1e-6));
  const x = (time) => width - ((engine.now - time) / WINDOW) * width;
  const y = (value) => height - 2 - (value / most) * (height - 16);
  pen.fillStyle = colours.line;
  pen.fillRect(0, height - 1, width, 1);
  byId(output).textContent = points.length ? text(middle(points.slice(-15).map((one) => one[1]))) : "";
  if (!points.length) {
    label(pen, "nothing in the last minute", 0, 11, colours);
    return;
  }
  pen.fillStyle = pen.strokeStyle = colours.decode;
  if (dots) {
    for (const [time, value] of points) {
      pen.fillRect(x(time) - 1, y(value) - 1, 3, 3);
    }
  } else {
    pen.beginPath();
    points.forEach(([time, value], index) => pen[index ? "lineTo" : "moveTo"](x(time), y(value)));
    pen.lineWidth = 1.5;
    pen.stroke();
    if (area) {
      pen.lineTo(x(points.at(-1)[0]), height);
      pen.lineTo(x(points[0][0]), height);
      pen.globalAlpha = 0.15;
      pen.fill();
      pen.globalAlpha = 1;
    }
  }
  label(pen, text(most), 0, 11, colours);
}

byId("timeline").addEventListener("pointermove", (event) => {
  const count = Math.floor(event.target.clientWidth / CELL);
  const index = Math.floor(event.offsetX / CELL) - (count - shownColumns.length);
  const column = shownColumns[index];
  if (column) {
    const { step } = column;
    const chunks = step.prefills.map(([id, tokens]) => `#${id} ${tokens} prompt tokens`);
    byId("step-text").textContent = [
      `Step ${step.number}: ${seconds(step.seconds)}`,
      ...chunks,
      `${step.decodes.length} decodes`,
      `${step.resident} seated, ${step.queued} queued`,
    ].join(" · ");
  }
});

// ---- looking again and again ---------------------------------------------------------------------

let timer = null;
let polling = false;

async function poll() {
  if (polling) {
    return;
  }
  polling = true;
  clearTimeout(timer);
  try {
    const response = await call(`v1/engine/steps?after=${engine.last}`);
    if (response.ok) {
      learn(await response.json());
      show();
      if (!model.known) {
        describeModel();
      }
    } else {
      unreachable(response.status === 401 ? "needs a key" : await complaint(response));
    }
  } catch (error) {
    unreachable(error instanceof TypeError ? "no connection" : error.message);
  }
  polling = false;
  if (!document.hidden) {
    timer = setTimeout(poll, byId("key-form").hidden ? EVERY : 5 * EVERY);
  }
}

function unreachable(text) {
  byId("state").textContent = text;
  byId("state").dataset.ok = "false";
}

document.addEventListener("visibilitychange", () => document.hidden || poll());
window.addEventListener("resize", () => engine.answer && draw());

// ---- the frame -----------------------------------------------------------------------------------

for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => {
    document.body.dataset.tab = button.dataset.show;
    for (const other of document.querySelectorAll("[data-show]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    if (engine.answer) {
      draw();
    }
  });
}

const THEME = "steppe-theme";

function setTheme(theme) {
  if (theme) {
    document.documentElement.dataset.theme = theme;
  }
  if (engine.answer) {
    draw();
  }
}
byId("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--ground").trim() === "#101614";
  localStorage.setItem(THEME, dark ? "light" : "dark");
  setTheme(localStorage.getItem(THEME));
});
setTheme(localStorage.getItem(THEME));

describeModel().catch(() => {}); // the poll says what is wrong
poll();

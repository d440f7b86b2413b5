// The page of one run: it hears news from its server and draws them. Text is only ever set as text.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const NAMES = { loss: "training loss", scaled_loss: "training loss, of scaled targets", epsilon: "epsilon" };
const PHASES = {
  perturbation: "Perturbation", preparation: "Preparation", local_forward: "Forward, at silos",
  local_backward: "Backward, at silos", aggregation: "Aggregation", update: "Update", delivery: "Delivery",
};
const WORDS = { waiting: "Waiting", running: "Running", ended: "Ended", failed: "Failed" };
const MOST_POINTS = 400, MOST_ROWS = 100, MOST_SILOS = 100, MOST_LOGGED = 200, RECENT = 20;

let run = {}, paused = false, drawn = true, contact = "open";

function forget() {
  run = { plan: run.plan || {}, state: run.state || {}, result: {}, rounds: [], malformed: 0, logged: [], more: 0, heard: 0 };
}

// -- Elements and words -----------------------------------------------------------------------------------------------

const at = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...inside) {
  const made = ["svg", "path", "line", "text", "circle", "rect", "title"].includes(tag)
    ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...inside);
  return made;
}

const figure = (value) => value === undefined || value === null ? "–"
  : Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));

function bytes(value) {
  for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

function seconds(value) {
  if (value < 10) return `${Number(value.toPrecision(2))} s`;
  if (value < 90) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.floor(value / 3600)} h ${Math.round(value % 3600 / 60)} min`;
  return `${Math.round(value / 86400)} days`;
}

const sum = (values) => values.reduce((total, one) => total + (one || 0), 0);
const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
const named = (key) => NAMES[key] || key.replaceAll("_", " ").replace(/\b(mse|auc)\b/, (word) => word.toUpperCase());

function thinned(list, most) {
  if (list.length <= most) return list;
  return Array.from({ length: most }, (_, number) => list[Math.round(number * (list.length - 1) / (most - 1))]);
}

function table(into, caption, head, rows) {
  const line = (cells, tag) => make("tr", {}, ...cells.map((cell, number) => {
    const text = cell instanceof Node ? cell : String(cell);
    const numeric = typeof cell === "number" || /^[–\d.,]+( (B|kB|MB|GB|s|min|%))?$/.test(cell);
    const kind = tag === "th" ? { scope: "col" } : number ? {} : { scope: "row" };
    if (head[number].numbers || (tag === "td" && head[number].numbers === undefined && numeric)) kind.class = "n";
    if (head[number].why && tag === "td") kind.class = "why";
    return make(tag === "td" && !number ? "th" : tag, kind, text);
  }));
  into.replaceChildren(make("caption", {}, caption),
    make("thead", {}, line(head.map((one) => one.name), "th")), make("tbody", {}, ...rows.map((row) => line(row, "td"))));
}

// -- Curves -----------------------------------------------------------------------------------------------------------

function groupOf(key) {
  if (key === "scaled_loss") return "Loss, of scaled targets";
  if (key.endsWith("loss")) return "Loss";
  if (/accuracy|top5|auc/.test(key)) return "Accuracy";
  if (key === "epsilon") return "Epsilon spent";
  const plain = key.replace(/^(test|validation)_/, "");
  return named(plain)[0].toUpperCase() + named(plain).slice(1);
}

function series() {
  const found = new Map();
  for (const one of run.rounds) {
    for (const [key, value] of Object.entries(one.figures)) {
      if (!found.has(key)) found.set(key, []);
      found.get(key).push([one.round, value]);
    }
  }
  return found;
}

function groups() {
  const found = new Map();
  for (const [key, points] of series()) {
    const group = groupOf(key);
    if (!found.has(group)) found.set(group, []);
    found.get(group).push({ key, points });
  }
  const order = ["Loss", "Accuracy"];
  return [...found].sort(([a], [b]) => (order.indexOf(a) + 1 || 9) - (order.indexOf(b) + 1 || 9));
}

// The least and the greatest of each bucket, in their order, so that no peak is lost.
function simplified(points) {
  if (points.length <= 2 * MOST_POINTS) return points;
  const size = points.length / MOST_POINTS, kept = [];
  for (let bucket = 0; bucket < MOST_POINTS; bucket += 1) {
    const part = points.slice(Math.floor(bucket * size), Math.floor((bucket + 1) * size));
    const low = part.reduce((a, b) => b[1] < a[1] ? b : a), high = part.reduce((a, b) => b[1] > a[1] ? b : a);
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

function ticks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const found = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number += 1) {
    found.push(Number((number * step).toPrecision(12)));
  }
  return found;
}

function chart(title, curves, width) {
  const height = 210, left = 52, right = 12, top = 8, bottom = 26;
  const values = curves.flatMap((one) => one.points.map((point) => point[1]));
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  if (low === high) [low, high] = [low - Math.abs(low || 1) / 10, high + Math.abs(high || 1) / 10];
  high += (high - low) / 25;
  const first = run.rounds[0].round;
  const last = Math.max(first + 1, run.plan.rounds || 0, ...curves.map((one) => one.points.at(-1)[0]));
  const x = (round) => left + (round - first) / (last - first) * (width - left - right);
  const y = (value) => top + (high - value) / (high - low) * (height - top - bottom);
  const said = curves.map((one) => `${named(one.key)} ${figure(one.points.at(-1)[1])} in round ${one.points.at(-1)[0]}`);
  const picture = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${said.join(", ")}` });
  for (const tick of ticks(low, high, 5)) {
    picture.append(make("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      make("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, figure(tick)));
  }
  for (const tick of ticks(first, last, width < 500 ? 4 : 7).filter(Number.isInteger)) {
    picture.append(make("text", { x: x(tick), y: height - 6, "text-anchor": tick === last ? "end" : "middle" }, figure(tick)));
  }
  picture.append(make("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom + 4, y2: height - bottom + 4 }));
  const legend = make("ul", { class: "legend" });
  curves.forEach(({ key, points }, number) => {
    const style = number % 4 + 1, shown = simplified(points);
    const path = shown.map((point, place) => `${place ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`);
    picture.append(make("path", { class: `curve l${style}`, d: path.join("") }));
    for (const point of points.length <= 60 ? points : points.slice(-1)) {
      picture.append(make("circle", { class: `d${style}`, cx: x(point[0]), cy: y(point[1]), r: 2.6 }));
    }
    const swatch = make("svg", { viewBox: "0 0 28 10", "aria-hidden": "true" },
      make("line", { class: `curve l${style}`, x1: 0, x2: 28, y1: 5, y2: 5 }));
    legend.append(make("li", {}, swatch, `${named(key)} ${figure(points.at(-1)[1])}`));
  });
  return make("figure", {}, make("h3", {}, `${title} by round`), picture, legend);
}

function drawCurves() {
  const found = groups(), charts = at("charts");
  at("no-curves").hidden = found.length > 0;
  at("numbers").hidden = found.length === 0;
  const columns = charts.clientWidth >= 800 && found.length > 1 ? 2 : 1;
  const width = Math.max(240, Math.floor(charts.clientWidth / columns) - (columns - 1) * 17);
  charts.replaceChildren(...found.map(([title, curves]) => chart(title, curves, width)));
  if (at("numbers").open) drawNumbers(found.flatMap(([, curves]) => curves.map((one) => one.key)));
}

function drawNumbers(keys) {
  const tested = run.rounds.filter((one) => keys.some((key) => key !== "loss" && key !== "scaled_loss" && key in one.figures));
  const wanted = tested.length > 1 ? tested : run.rounds, rows = thinned(wanted, MOST_ROWS).reverse();
  const kept = rows.length < run.rounds.length ? `${rows.length} of ${run.rounds.length} rounds, the last first.` : "The last first.";
  table(at("rounds"), kept, [{ name: "Round", numbers: false }, ...keys.map((key) => ({ name: named(key), numbers: true }))],
    rows.map((one) => [one.round, ...keys.map((key) => figure(one.figures[key]))]));
}

// -- Everything else --------------------------------------------------------------------------------------------------

function drawHead() {
  const { plan, state, rounds, result } = run, last = rounds.at(-1);
  const number = last ? last.round : 0, planned = state.state === "ended" && result.rounds ? result.rounds : plan.rounds;
  at("name").textContent = plan.name || "A run of Moretta";
  at("protocol").textContent = plan.protocol ? `Moretta · ${plan.protocol}` : "Moretta";
  at("insecure").hidden = !plan.insecure;
  at("folder").textContent = plan.folder ? `Run folder: ${plan.folder}` : "";
  at("word").textContent = WORDS[state.state] || "Connecting";
  at("word").className = state.state || "";
  const best = state.state === "ended" && result.best_round ? `It returned to its best round, ${result.best_round}.` : "";
  at("sentence").textContent = state.sentence || best || (state.state === "waiting" ? "No round has ended yet." : "");
  at("done").textContent = planned ? `Round ${figure(number)} of ${figure(planned)}` : number ? `Round ${figure(number)}` : "No round has ended yet";
  at("bar").max = planned || Math.max(1, number);
  at("bar").value = number;
  document.title = `${planned ? `${number}/${planned}` : number} ${WORDS[state.state] || ""}: ${plan.name || "run"}`;
  drawFigures(number, planned);
}

function drawFigures(number, planned) {
  const { state, rounds, result } = run, shown = [];
  const latest = (key) => rounds.findLast((one) => key in one.figures)?.figures[key];
  const totals = rounds.slice(-RECENT).map((one) => one.total).filter((one) => one !== undefined);
  const scores = state.state === "ended" && result.test ? { ...result.test } : {};
  for (const key of ["loss", "accuracy", "mse"]) {
    const value = scores[key] ?? latest(`test_${key}`);
    if (value !== undefined) shown.push([`Test ${named(key).replace("training ", "")}`, figure(value)]);
  }
  for (const key of shown.length ? [] : ["loss", "scaled_loss"]) {
    if (latest(key) !== undefined) shown.push([named(key)[0].toUpperCase() + named(key).slice(1), figure(latest(key))]);
  }
  shown.push(["Time of rounds", seconds(sum(rounds.map((one) => one.total)))]);
  if (totals.length) shown.push(["A round, median", seconds(median(totals))]);
  if (state.state === "running" && planned && totals.length) {
    shown.push(["Left, at most", `about ${seconds(median(totals) * Math.max(0, planned - number))}`]);
  }
  const spent = result.facts?.epsilon ?? latest("epsilon");
  if (result.unbounded || rounds.at(-1)?.no_numbers.includes("epsilon")) shown.push(["Epsilon spent", "unbounded"]);
  else if (spent !== undefined) shown.push(["Epsilon spent", figure(spent)]);
  if (result.facts?.delta !== undefined) shown.push(["Delta", figure(result.facts.delta)]);
  const repeated = rounds.filter((one) => one.attempt > 0).length;
  if (repeated) shown.push(["Rounds repeated", figure(repeated)]);
  at("figures").replaceChildren(...shown.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function drawMissing() {
  const last = run.rounds.at(-1), silos = new Map();
  for (const one of [...run.rounds, { missing: run.result.missing || [] }]) {
    for (const gone of one.missing) {
      silos.set(gone.silo, { times: (silos.get(gone.silo)?.times || 0) + 1, round: gone.round, reason: gone.reason });
    }
  }
  const now = last ? last.missing.map((gone) => gone.silo) : [];
  at("now").textContent = !last ? "No round has ended yet." : now.length
    ? `In the last round: ${now.join(", ")}.` : silos.size ? "In the last round nobody was missing." : "No silo missed a round.";
  const rows = [...silos].sort(([, a], [, b]) => b.round - a.round).slice(0, MOST_SILOS);
  const made = make("table");
  table(made, rows.length < silos.size ? `${MOST_SILOS} of ${silos.size} silos, the last missing first.` : "The last missing first.",
    [{ name: "Silo" }, { name: "Times", numbers: true }, { name: "Last in round", numbers: true }, { name: "Why", why: true }],
    rows.map(([silo, gone]) => [silo, gone.times, gone.round, gone.reason]));
  at("missed").replaceChildren(...(rows.length ? [made] : []));
}

function drawWarnings() {
  const { result, logged, more, malformed } = run, said = [...(result.warnings || [])];
  if (malformed) said.push(`${malformed} ${malformed > 1 ? "lines" : "line"} of history.jsonl cannot be read and ${malformed > 1 ? "are" : "is"} left out`);
  const broken = run.rounds.at(-1)?.no_numbers.filter((key) => key !== "epsilon") || [];
  if (broken.length) said.push(`In the last round there is no number for: ${broken.map(named).join(", ")}. The run has probably diverged.`);
  at("warned").replaceChildren(...said.map((one) => make("li", {}, one)));
  const others = logged.filter((one) => !said.includes(one.text)); // a result's warnings stand in the log too
  const lines = others.slice(-MOST_LOGGED).reverse(), all = others.length + more;
  if (!lines.length) {
    at("logged").replaceChildren(...(said.length ? [] : [make("p", { class: "none" }, "There is no warning.")]));
    return;
  }
  const open = at("logged").querySelector("details")?.open ?? all <= 5, focused = at("logged").contains(document.activeElement);
  const inside = make("details", open ? { open: "" } : {},
    make("summary", {}, `From the log: ${figure(all)}${all > lines.length ? `, of which the last ${lines.length} are shown` : ""}, the last first`),
    make("ul", {}, ...lines.map((one) => make("li", {}, `${one.at.replace(/,\d+$/, "")} ${one.level === "WARNING" ? "" : `${one.level} `}${one.text}`))));
  at("logged").replaceChildren(inside);
  if (focused) inside.querySelector("summary").focus();
}

function drawCosts() {
  const phases = {}, last = run.rounds.at(-1), total = sum(run.rounds.map((one) => one.total));
  for (const one of run.rounds) {
    for (const [name, value] of Object.entries(one.seconds)) phases[name] = (phases[name] || 0) + value;
  }
  const all = Object.entries(phases).filter(([, value]) => value > 0).sort(([, a], [, b]) => b - a);
  const most = Math.max(...all.map(([, value]) => value));
  const share = (value) => make("svg", { class: "share", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
    make("rect", { x: 0, y: 0, width: 100 * value / most, height: 10 }));
  table(at("phases"), `Rounds took ${seconds(total)} in all.`, [{ name: "Phase" }, { name: "Seconds", numbers: true }, { name: "" , numbers: false }],
    all.map(([name, value]) => [PHASES[name] || named(name), value.toFixed(value < 10 ? 2 : 1), share(value)]));
  at("phases").hidden = !all.length;
  at("phases-note").textContent = last && !all.length
    ? `Rounds took ${seconds(total)} in all. There are no phases: where noise hides rows, how long silos compute would reveal something about them.` : "Phases of silos that work at the same time are added up.";
  const mean = (way) => run.rounds.length ? sum(run.rounds.map((one) => one.bytes[way])) / run.rounds.length : 0;
  const whole = (what) => sum(run.rounds.map((one) => one.bytes[what]));
  const now = (what) => last ? bytes(last.bytes[what] || 0) : "–";
  table(at("bytes"), "Bytes of messages.", [{ name: "" }, { name: "Whole run", numbers: true }, { name: "Last round", numbers: true }], [
    ["Up, a silo and round", bytes(mean("up")), now("up")], ["Down, a silo and round", bytes(mean("down")), now("down")],
    ["Secure aggregation: keys, shares", bytes(whole("secure_aggregation")), now("secure_aggregation")],
    ["Set-up", bytes(whole("set_up")), now("set_up")],
  ]);
}

function drawContact() {
  const quiet = (Date.now() - run.heard) / 1000, usual = median(run.rounds.slice(-RECENT).map((one) => one.total || 0)) || 0;
  const contactSays = {
    lost: "No answer from the command that serves this page; what it shows may be old. Trying again.",
    over: `The command has ended, so nothing more will come. To look again: moretta watch ${run.plan.folder || "DIR"}`,
  };
  let text = contactSays[contact] || "";
  if (paused) text = "The page stands still; the run goes on.";
  else if (!text && run.heard && ["running", "waiting"].includes(run.state.state)) {
    text = `Last news ${seconds(Math.max(1, quiet))} ago.`;
    if (!run.state.here && quiet > Math.max(120, 10 * usual)) text += " If its process has ended, train --resume goes on.";
  }
  at("contact").textContent = text;
  at("contact").className = contact === "lost" && !paused ? "lost" : "";
}

function draw() {
  drawn = true;
  if (paused) return;
  for (const part of [drawHead, drawCurves, drawMissing, drawWarnings, drawCosts, drawContact]) part();
}

// At most four times a second, however fast rounds are; also in a tab that nobody sees, which has no animation frames.
function soon() {
  if (!drawn) return;
  drawn = false;
  setTimeout(draw, 250);
}

// -- News -------------------------------------------------------------------------------------------------------------

const NEWS = {
  begin: forget,
  plan: (data) => { run.plan = data; },
  rounds: (data) => { for (const one of data.rounds) run.rounds.push(one); run.malformed += data.malformed; run.heard = Date.now(); },
  log: (data) => { run.more += data.more; run.logged.push(...data.lines); run.more += run.logged.splice(0, run.logged.length - MOST_LOGGED).length; },
  result: (data) => { run.result = data; },
  state: (data) => { run.state = data; run.heard = Date.now() - data.age * 1000; },
};

function listen() {
  const source = new EventSource("events");
  for (const [kind, take] of Object.entries(NEWS)) {
    source.addEventListener(kind, (event) => { contact = "open"; take(JSON.parse(event.data)); soon(); });
  }
  source.addEventListener("bye", () => { contact = "over"; source.close(); soon(); });
  source.onopen = () => { contact = "open"; soon(); };
  source.onerror = () => { if (contact !== "over") contact = "lost"; soon(); };
}

forget();
at("pause").addEventListener("click", () => {
  paused = !paused;
  at("pause").setAttribute("aria-pressed", String(paused));
  if (paused) drawContact(); else draw();
});
at("numbers").addEventListener("toggle", drawCurves);
addEventListener("resize", soon);
setInterval(() => { if (!paused) drawContact(); }, 1000);
listen();

// The live page: asks once a second for what is new, and redraws what has changed.
//
// Texts of a run become text nodes alone. What is kept is bounded: the history has at most some hundred spans, and of
// each worker that is shown only the cells of the last seconds.
"use strict";
(() => {
  const P = globalThis.Paceline;
  const { html } = P;
  const token = new URLSearchParams(location.search).get("token") ?? "";
  const KINDS = ["computing", "waiting", "exchanging", "cancelled"];
  const STATES = { c: "computing", w: "waiting", e: "exchanging", d: "dead", l: "left", "?": "expected" };
  const [EVERY, PATIENCE, ROWS, FEW] = [1000, 8000, 32, 24];
  const LAG = 1.5; // seconds by which the strips are late, so that their ends have arrived
  const SMOOTH = 2; // seconds over which rates are averaged
  const at = (id) => document.getElementById(id);

  let turn = -1;
  let first = 0; // the first worker that has a row
  let spans = new Map(); // of the history, by number
  let strips = new Map(); // rank -> Map(number of a cell -> its shares)
  let shown = {}; // what was last drawn, to leave alone what is the same
  let clock = null; // {run: seconds of the run's clock, here: the page's, when they came}
  let palette = null; // of the canvases
  let data = null;

  // Asking --------------------------------------------------------------------------------------------------------

  async function ask() {
    const query = new URLSearchParams({ token, since: turn, first });
    const answer = await fetch(`data?${query}`, { signal: AbortSignal.timeout(PATIENCE), cache: "no-store" });
    if (answer.status === 403) throw new Error("the watcher is another one now: open the address that it has printed");
    if (!answer.ok) throw new Error(`the watcher answered ${answer.status}`);
    return answer.json();
  }

  async function follow() {
    for (;;) {
      const began = performance.now();
      try {
        take(await ask());
        tell("lost", null);
      } catch (error) {
        const reason = error instanceof TypeError || error.name === "TimeoutError" ? "paceline watch does not answer; has it been ended?" : error.message;
        tell("lost", `${reason} What is shown is from before.`);
        setStage("lost", "no contact");
      }
      await new Promise((resolve) => setTimeout(resolve, Math.max(200, EVERY - (performance.now() - began))));
    }
  }

  function take(answer) {
    data = answer;
    const run = data.run;
    turn = data.turn;
    if (run.whole) {
      spans = new Map();
      strips = new Map();
    }
    for (const span of run.history.spans) spans.set(span[0], span);
    for (const worker of run.workers) keepCells(worker, run.cells);
    clock = { run: run.now, here: performance.now() };
    palette = null; // the scheme may be another one now
    draw();
  }

  function keepCells(worker, most) {
    if (!strips.has(worker.rank)) strips.set(worker.rank, new Map());
    const cells = strips.get(worker.rank);
    const shares = Uint8Array.from(atob(worker.shares), (letter) => letter.charCodeAt(0));
    for (let k = 0; 4 * k < shares.length; k++) cells.set(worker.first + k, shares.subarray(4 * k, 4 * k + 4));
    const newest = worker.first + shares.length / 4 - 1;
    if (cells.size > 2 * most) for (const number of cells.keys()) if (number <= newest - most) cells.delete(number);
  }

  // Drawing -------------------------------------------------------------------------------------------------------

  // Calls `make` if the value is another one than last time.
  function changed(name, value, make) {
    const text = JSON.stringify(value);
    if (shown[name] === text) return;
    shown[name] = text;
    make();
  }

  function tell(id, text) {
    at(id).hidden = !text;
    if (text && at(id).textContent !== text) at(id).textContent = text;
  }

  function setStage(name, text) {
    at("stage").className = `stage ${name}`;
    if (at("stage").textContent !== text) at("stage").textContent = text;
  }

  function draw() {
    const run = data.run;
    const name = data.name.split("/").filter(Boolean).pop() ?? data.name;
    changed("name", data.name, () => {
      at("name").textContent = name;
      document.title = `${name} · paceline watch`;
    });
    const { problem, policy, codec, seed, delay } = run.config;
    const about = [problem, policy, codec && `codec ${codec}`, delay && `delay ${delay}`, seed !== null && `seed ${seed}`, run.virtual && "virtual time"];
    changed("about", about, () => (at("about").textContent = about.filter(Boolean).join(" · ")));
    setStage(data.stage, { waiting: "waiting for the run to begin", running: "going on", ended: "ended" }[data.stage]);
    tell("message", data.stage === "waiting" ? `There is no run in ${data.name} yet. This page begins when the run does.` : data.message);
    drawEnd();
    changed("comparison", data.comparison, drawComparison);
    at("live").hidden = data.stage === "waiting" || (data.stage === "ended" && data.report); // the report has it all
    changed("tiles", tiles(run), drawTiles);
    const share = run.progress.share;
    at("progress").hidden = share === null;
    if (share !== null) at("progress").value = share;
    changed("counts", run.counts, () => drawCounts(run));
    changed("map", run.states, () => drawMap(run.states));
    changed("pages", [run.states.length, first], () => drawPages(run.states.length));
    drawWorkers(run);
    drawCurves(run);
    changed("changes", [run.changes, run.changed], () => drawChanges(run));
  }

  function drawEnd() {
    const ended = data.stage === "ended";
    const dead = data.run.counts.dead;
    changed("end", [ended, data.report, dead], () => {
      at("ended").hidden = !ended;
      const how = dead ? `The run has ended; ${dead} of its workers did not leave by themselves.` : "The run has ended. If it is resumed, this page goes on.";
      at("ended-how").textContent = data.report ? how : `${how} Its report is being made.`;
      at("report").hidden = !(ended && data.report);
      if (ended && data.report) at("report").src = `report?${new URLSearchParams({ token })}`;
      else at("report").removeAttribute("src");
    });
  }

  function drawComparison() {
    at("comparison").hidden = data.comparison === null;
    if (data.comparison === null) return;
    const row = (run) => html("tr", {}, html("td", {}, run.policy), html("td", { class: "left" }, run.seed), html("td", { class: "left" }, run.error ? `${run.status}: ${run.error}` : run.status));
    at("runs").replaceChildren(...data.comparison.runs.map(row));
  }

  // Tiles: name, value, and what is said below it.
  function tiles(run) {
    const { progress, figures } = run;
    const epoch = progress.epochs ? `epoch ${Math.min(progress.epoch + 1, progress.epochs)} of ${progress.epochs}` : `epoch ${progress.epoch + 1}`;
    const done = progress.share === null ? null : P.percent(progress.share);
    const left = progress.seconds_left === null ? null : `about ${P.duration(progress.seconds_left)} left`;
    const quiet = data.stage === "running" && progress.quiet > 5 ? `the last one ${P.duration(progress.quiet)} ago` : null;
    const test = run.evaluations.at(-1);
    const metric = test && metricOf(test);
    const rows = [
      ["updates", progress.step.toLocaleString("en"), quiet ?? epoch],
      ["time", P.duration(progress.seconds), [done, left].filter(Boolean).join(", ")],
      ["training loss", P.number(figures.loss, 4), figures.learning_rate === null ? "" : `learning rate ${P.number(figures.learning_rate)}`],
      ["examples/s", P.number(figures.examples_per_second), figures.updates_per_second === null ? "" : `${P.number(figures.updates_per_second)} updates/s`],
    ];
    if (metric) rows.push([`test ${metric.replaceAll("_", " ")}`, P.number(test[metric], 4), `at update ${test.step.toLocaleString("en")}`]);
    if (figures.staleness !== null) rows.push(["mean staleness", P.number(figures.staleness), "of the last pushes"]);
    if (figures.bytes > 0) rows.push(["exchanged", P.quantity(figures.bytes, "bytes"), "by all workers"]);
    return rows;
  }

  const metricOf = (test) => Object.keys(test).filter((name) => !["time", "step", "test_loss"].includes(name))[0];

  function drawTiles() {
    const rows = tiles(data.run);
    at("tiles").replaceChildren(...rows.map(([name, value, below]) => html("div", {}, html("dt", {}, name), html("dd", {}, value, html("small", {}, below || "\u00a0")))));
  }

  P.duration = (seconds) => {
    if (!Number.isFinite(seconds)) return "–";
    if (seconds < 60) return `${seconds < 9.95 ? seconds.toFixed(1) : Math.round(seconds)}\u00a0s`;
    const minutes = Math.floor(Math.round(seconds) / 60);
    if (minutes < 60) return `${minutes}:${String(Math.round(seconds) % 60).padStart(2, "0")}\u00a0min`;
    return `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}\u00a0h`;
  };

  // Workers -------------------------------------------------------------------------------------------------------

  function drawCounts(run) {
    const total = run.states.length;
    const parts = Object.entries(run.counts).filter(([, count]) => count > 0);
    const texts = parts.map(([state, count]) => html("span", { class: `state ${state}` }, `${count} ${state}`));
    at("counts").replaceChildren(`${total} worker${total === 1 ? "" : "s"}:`, ...texts.flatMap((text) => [" ", text]));
  }

  // A square for each of many workers; the squares stay, and only their classes change.
  function drawMap(states) {
    const map = at("map");
    map.hidden = states.length <= FEW || states.length > 2000;
    if (map.hidden) return map.replaceChildren();
    while (map.children.length > states.length) map.lastChild.remove();
    while (map.children.length < states.length) map.append(html("i", { title: `worker ${map.children.length}` }));
    [...states].forEach((letter, k) => {
      if (map.children[k].className !== STATES[letter]) map.children[k].className = STATES[letter];
    });
  }

  function drawPages(total) {
    const pages = at("pages");
    pages.hidden = total <= ROWS;
    const select = html("select", { "aria-label": "workers that are listed" });
    for (let from = 0; from < total; from += ROWS) select.append(html("option", { value: from, selected: from === first }, `workers ${from} to ${Math.min(total, from + ROWS) - 1}`));
    select.addEventListener("change", () => {
      first = Number(select.value);
      turn = -1; // the cells of other workers are asked for from the beginning
      strips = new Map();
    });
    if (total > ROWS) pages.replaceChildren(select);
  }

  function drawWorkers(run) {
    const body = at("workers");
    const wanted = run.workers.map((worker) => worker.rank).join();
    if (shown.rows !== wanted) {
      shown.rows = wanted;
      body.replaceChildren(...run.workers.map((worker) => makeRow(worker.rank)));
    }
    at("window").textContent = `the last ${Math.round(run.cells * run.cell)} seconds`;
    run.workers.forEach((worker, k) => fillRow(body.children[k], worker));
    drawStrips();
  }

  function makeRow(rank) {
    const cells = ["rank", "now", "step", "pace", "waiting"].map((name) => html(name === "rank" ? "th" : "td", { class: name === "now" ? "left" : `of-${name}`, scope: name === "rank" ? "row" : null }));
    cells[0].textContent = String(rank);
    cells[1].append(html("span", { class: "state" }));
    return html("tr", {}, cells, html("td", { class: "strip" }, html("canvas", { role: "img" })));
  }

  function fillRow(row, worker) {
    const [, now, step, pace, waiting, strip] = row.children;
    const state = worker.incarnation > 0 ? `${worker.state} (life ${worker.incarnation + 1})` : worker.state;
    const texts = [state, worker.step.toLocaleString("en"), P.quantity(worker.seconds_per_step, "seconds"), worker.waiting === null ? "–" : P.percent(worker.waiting)];
    if (now.firstChild.className !== `state ${worker.state}`) now.firstChild.className = `state ${worker.state}`;
    [now.firstChild, step, pace, waiting].forEach((element, k) => {
      if (element.textContent !== texts[k]) element.textContent = texts[k];
    });
    step.title = "step";
    pace.title = "computing time of a step";
    waiting.title = "share of the last seconds in which it waited";
    strip.firstChild.setAttribute("aria-label", `worker ${worker.rank}: ${worker.state}, waiting ${texts[3]} of the last seconds`);
  }

  // Canvases know no style sheet: the colours are those of elements that do.
  function readColours() {
    const found = {};
    for (const name of [...KINDS, "dead", "hatch", "accent"]) {
      const probe = html("i", { class: `probe probe-${name}` });
      document.body.append(probe);
      found[name] = getComputedStyle(probe).color;
      probe.remove();
    }
    return found;
  }

  // The strips move on between two answers, by the page's clock.
  function drawStrips() {
    if (!data || at("live").hidden) return;
    const run = data.run;
    const moving = data.stage === "running" && !run.virtual;
    const now = clock.run + (moving ? (performance.now() - clock.here) / 1000 : 0);
    palette = palette ?? readColours();
    run.workers.forEach((worker, k) => drawStrip(at("workers").children[k].lastChild.firstChild, worker, now));
  }

  function drawStrip(canvas, worker, now) {
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const ratio = Math.min(3, devicePixelRatio || 1);
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const { cell, cells } = data.run;
    const begin = now - LAG - cells * cell;
    const x = (time) => ((time - begin) / (cells * cell)) * width;
    const each = width / cells;
    for (const [number, shares] of strips.get(worker.rank) ?? []) {
      const left = x(number * cell);
      if (left + each < 0 || left > width) continue;
      let bottom = height;
      const whole = shares[0] + shares[1] + shares[2] + shares[3];
      const scale = height / Math.max(255 * 0.9, whole); // a cell that is nearly full is drawn full
      KINDS.forEach((kind, k) => {
        if (!shares[k]) return;
        pen.fillStyle = palette[kind];
        pen.fillRect(left, bottom - shares[k] * scale, each + 0.4, shares[k] * scale);
        bottom -= shares[k] * scale;
      });
    }
    for (const [from, to] of worker.dead) drawDeath(pen, Math.max(0, x(from)), Math.min(width, x(to)), height);
  }

  function drawDeath(pen, left, right, height) {
    if (!(right > left)) return;
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, right - left, height);
    pen.clip();
    pen.fillStyle = palette.dead;
    pen.fillRect(left, 0, right - left, height);
    pen.strokeStyle = palette.hatch;
    pen.lineWidth = 1.2;
    pen.beginPath();
    for (let start = Math.floor(left / 8) * 8 - height; start < right; start += 8) {
      pen.moveTo(start, height);
      pen.lineTo(start + height, 0);
      pen.moveTo(start, 0);
      pen.lineTo(start + height, height);
    }
    pen.stroke();
    pen.restore();
  }

  // Curves --------------------------------------------------------------------------------------------------------

  // A figure that is pointed at, or has the focus, stays as it is, so that its values can be read.
  const isRead = (element) => element.matches(":hover") || element.contains(document.activeElement);

  function drawCurves(run) {
    const { began, width } = run.history;
    const ordered = [...spans.values()].sort((a, b) => a[0] - b[0]);
    const column = (number, label, style) => {
      const there = ordered.filter((span) => span[number] !== null);
      return { label, style, x: there.map((span) => (span[0] + 0.5) * width), y: there.map((span) => span[number]) };
    };
    const figures = [
      ["loss", column(1, "training loss", 0)],
      ["throughput", smoothed(column(2, "examples per second", 2), Math.ceil(SMOOTH / width))],
    ];
    const tests = run.evaluations;
    const metric = tests.length ? metricOf(tests.at(-1)) ?? "test_loss" : null;
    at("test-panel").hidden = !metric;
    if (metric) {
      const title = metric === "test_loss" ? "test loss" : `test ${metric.replaceAll("_", " ")}`;
      at("test-title").textContent = title[0].toUpperCase() + title.slice(1);
      const there = tests.filter((test) => Number.isFinite(test[metric]));
      figures.push(["test", { label: title, style: 1, x: there.map((test) => Math.max(0, test.time - began)), y: there.map((test) => test[metric]) }]);
    }
    for (const [id, series] of figures) {
      const element = at(id);
      if (!element.clientWidth || isRead(element)) continue;
      changed(`curve-${id}`, [series, element.clientWidth], () => P.drawCurves(element, { series: [series] }, { label: `${series.label} against time`, xLabel: "time since the run began", xUnit: "seconds", height: 220, endLabels: false, empty: "Nothing has been measured yet." }));
    }
    drawStaleness(run);
  }

  // Each value becomes the mean of the last `count` ones.
  function smoothed(series, count) {
    const mean = (k) => series.y.slice(Math.max(0, k + 1 - count), k + 1).reduce((sum, y) => sum + y, 0) / Math.min(count, k + 1);
    return { ...series, y: series.y.map((_, k) => mean(k)) };
  }

  function drawStaleness(run) {
    at("staleness-panel").hidden = !run.staleness.length;
    if (!run.staleness.length || isRead(at("staleness"))) return;
    const most = Math.min(2000, run.staleness.at(-1)[0]);
    const counts = Array(most + 1).fill(0);
    for (const [value, count] of run.staleness) counts[Math.min(most, Math.max(0, value))] += count;
    changed("staleness", [counts, at("staleness").clientWidth], () => P.drawHistogram(at("staleness"), { panels: [{ label: "pushes", style: 3, counts, mean: run.figures.staleness }] }, { xLabel: "staleness (commits)" }));
  }

  // Births and deaths -----------------------------------------------------------------------------------------------

  function drawChanges(run) {
    const count = (name) => run.changed[name] ?? 0;
    at("changed").textContent = `${count("joined")} joined, ${count("left")} left, ${count("died")} died.`;
    const row = ([time, worker, happening, incarnation]) => {
      const life = incarnation > 0 ? `, life ${incarnation + 1}` : "";
      return html("tr", {}, html("td", {}, P.duration(Math.max(0, time - run.progress.began))), html("td", { class: happening }, `worker ${worker} ${happening}${life}`));
    };
    at("changes").replaceChildren(...run.changes.toReversed().map(row)); // the last one first
  }

  at("kinds").replaceChildren(P.kindLegend([...KINDS, "dead"]));
  setInterval(() => {
    if (!document.hidden && data?.stage === "running") drawStrips();
  }, 200);
  addEventListener("resize", () => data && draw());
  follow();
})();

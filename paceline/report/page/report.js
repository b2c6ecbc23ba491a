// Makes the report from the data inside the page. Texts become text nodes alone, never markup.
"use strict";
(() => {
  const P = globalThis.Paceline;
  const { html } = P;

  // Numbers as CSV ----------------------------------------------------------------------------------------------

  // A spreadsheet would run a text that begins like a formula.
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };

  P.csvLink = (name, rows) => {
    const link = html("a", { href: "#", download: `${name}.csv`, "aria-label": `${name} as CSV` }, "CSV");
    const fill = () =>
      (link.href = `data:text/csv;charset=utf-8,${encodeURIComponent(
        rows()
          .map((row) => row.map(cell).join(","))
          .join("\r\n"),
      )}`);
    for (const event of ["pointerdown", "focus", "mouseover"]) link.addEventListener(event, fill);
    return link;
  };

  const curveRows = (series, x) => () => [
    ["label", x, "mean", "smallest", "largest"],
    ...series.flatMap((each) =>
      each.x.map((value, k) => [each.label, value, each.y[k], each.low?.[k] ?? each.y[k], each.high?.[k] ?? each.y[k]]),
    ),
  ];

  // Parts of the page -------------------------------------------------------------------------------------------

  function section(title, text, ...children) {
    return html("section", {}, html("h2", {}, title), text ? html("p", { class: "muted" }, text) : null, ...children);
  }

  function panel(title, link) {
    const body = html("div");
    const whole = html(
      "div",
      { class: "panel" },
      html("div", { class: "title" }, html("h3", {}, title), link ?? null),
      body,
    );
    return { whole, body };
  }

  function choice(name, texts, chosen, action) {
    const buttons = texts.map((text) =>
      html("button", { type: "button", "aria-pressed": text === chosen ? "true" : "false" }, text),
    );
    buttons.forEach((button, k) =>
      button.addEventListener("click", () => {
        buttons.forEach((other) => other.setAttribute("aria-pressed", other === button ? "true" : "false"));
        action(texts[k]);
      }),
    );
    return html("div", { class: "switch", role: "group", "aria-label": name }, buttons);
  }

  P.themeSwitch = () =>
    choice("colours", ["auto", "light", "dark"], "auto", (theme) => {
      if (theme === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = theme;
      document.dispatchEvent(new Event("paceline-theme"));
    });

  function heading(data) {
    const messages = [
      ...data.failures.map((text) => html("p", { class: "message failure", role: "alert" }, text)),
      ...data.notes.map((text) => html("p", { class: "message" }, text)),
    ];
    return [
      html(
        "header",
        {},
        html("div", {}, html("h1", {}, data.title), html("p", { class: "lead" }, data.sentence)),
        P.themeSwitch(),
      ),
      ...messages,
    ];
  }

  // The table ---------------------------------------------------------------------------------------------------

  const COLUMNS = [
    [
      "seconds to target",
      (row) => (Number.isFinite(row.seconds_to_target) ? P.fixed(row.seconds_to_target) : "–"),
      (row) => {
        if (row.reached < row.seeds) return row.reached ? `${row.reached} of ${row.seeds} seeds` : null;
        return row.seeds > 1 && row.seconds_spread !== null ? `± ${P.number(row.seconds_spread, 2)}` : null;
      },
      "seconds_to_target",
    ],
    [
      "speed-up over one worker",
      (row) => (Number.isFinite(row.speed_up) ? `${P.fixed(row.speed_up)}×` : "–"),
      () => null,
      "speed_up",
    ],
    [
      "final error",
      (row, percent) => (percent ? P.percent(row.final_error, 1) : P.number(row.final_error)),
      (row, percent) =>
        row.seeds > 1 && row.final_error_spread !== null
          ? `± ${percent ? P.percent(row.final_error_spread, 1) : P.number(row.final_error_spread, 2)}`
          : null,
      "final_error",
    ],
    ["MB sent", (row) => P.fixed(row.megabytes), () => null, "megabytes"],
    ["mean staleness", (row) => P.fixed(row.mean_staleness), () => null, "mean_staleness"],
    ["waiting", (row) => P.percent(row.waiting ?? NaN, 0), () => null, "waiting"],
    [
      "thrown away",
      (row) => P.percent(row.thrown_away ?? NaN, row.thrown_away > 0 && row.thrown_away < 0.01 ? 1 : 0),
      () => null,
      "thrown_away",
    ],
    ["examples per second", (row) => P.number(row.examples_per_second), () => null, "examples_per_second"],
  ];

  function summary(data) {
    const columns = COLUMNS.filter(
      ([, , , key]) =>
        data.summary.some((row) => Number.isFinite(row[key])) ||
        (key === "seconds_to_target" && Number.isFinite(data.error.target)), // that nobody reached it must be seen
    );
    const isShown = (wanted) => columns.some(([, , , key]) => key === wanted);
    const known = data.summary.map((row) => row.seconds_to_target).filter((each) => Number.isFinite(each));
    const best = Math.min(...known);
    const rows = data.summary.map((row) =>
      html(
        "tr",
        {},
        html("th", { scope: "row" }, row.label),
        columns.map(([name, show, small, key]) => {
          const text = show(row, data.error.percent);
          const wins = key === "seconds_to_target" && row[key] === best && known.length > 1;
          const under = small(row, data.error.percent);
          const value = html(
            "span",
            {},
            wins ? html("strong", {}, text) : text,
            under ? html("small", {}, under) : null,
          );
          return html("td", { "data-label": name }, value);
        }),
      ),
    );
    const head = html(
      "thead",
      {},
      html(
        "tr",
        {},
        html("th", { scope: "col" }, "policy"),
        columns.map(([name]) => html("th", { scope: "col" }, name)),
      ),
    );
    const link = P.csvLink("summary", () => [
      ["policy", "seeds", ...columns.map(([, , , key]) => key)],
      ...data.summary.map((row) => [row.label, row.seeds, ...columns.map(([, , , key]) => row[key])]),
    ]);
    const whole = section("Summary", null, html("table", { class: "cards" }, head, html("tbody", {}, rows)));
    whole.append(
      html(
        "p",
        { class: "hint muted" },
        data.summary.some((row) => row.seeds > 1)
          ? "Means over the seeds; ± is half of what the largest and the smallest differ in. "
          : "",
        isShown("speed_up") ? "The speed-up is the time of one worker to the target over that of the policy. " : "",
        isShown("waiting") ? "Waiting and thrown-away work are shares of the living workers' time. " : "",
        link,
      ),
    );
    return whole;
  }

  // Curves ------------------------------------------------------------------------------------------------------

  function errors(data) {
    let scale = data.error.percent ? "log" : "linear";
    const target = { target: data.error.target ?? NaN, targetLabel: data.error.target_label };
    const banded = data.curves.time.some((each) => each.low);
    const figures = [
      ["time", "Error against time", data.time, "seconds"],
      ["examples", "Error against examples", "examples of all workers", "count"],
      ["bytes", "Error against bytes", "bytes of all workers", "bytes"],
    ].map(([name, title, xLabel, xUnit]) => {
      const series = data.curves[name];
      const { whole, body } = panel(
        title,
        series.length ? P.csvLink(`error-against-${name}`, curveRows(series, name)) : null,
      );
      const draw = () =>
        P.drawCurves(
          body,
          { series, ...target },
          {
            xLabel,
            xUnit,
            yLabel: data.error.label,
            yScale: scale,
            yPercent: data.error.percent,
            empty: `No evaluation tells of ${xLabel}.`,
          },
        );
      P.responsive(body, draw);
      return { whole, draw };
    });
    const scales = choice("scale of errors", ["log", "linear"], scale, (chosen) => {
      scale = chosen;
      figures.forEach((figure) => figure.draw());
    });
    const text = banded ? "Lines are means over the seeds; bands reach from the smallest to the largest." : null;
    return section(
      "Error",
      text,
      html("div", { class: "controls" }, scales),
      figures[0].whole,
      html("div", { class: "grid-2" }, figures[1].whole, figures[2].whole),
    );
  }

  function loss(data) {
    const series = data.curves.loss;
    const values = series.flatMap((each) => each.y).filter((value) => value > 0);
    let scale = Math.max(...values) > 20 * Math.min(...values) ? "log" : "linear";
    const link = series.length ? P.csvLink("training-loss", curveRows(series, "seconds")) : null;
    const { whole, body } = panel("Training loss against time", link);
    const axes = { xLabel: data.time, xUnit: "seconds", yLabel: "training loss" };
    const empty = "No line of metrics has a loss.";
    const draw = () => P.drawCurves(body, { series }, { ...axes, yScale: scale, empty });
    P.responsive(body, draw);
    const scales = choice("scale of losses", ["log", "linear"], scale, (chosen) => {
      scale = chosen;
      draw();
    });
    return section("Training loss", null, html("div", { class: "controls" }, scales), whole);
  }

  // Speed -------------------------------------------------------------------------------------------------------

  function speed(data) {
    const parts = panel(
      "Where the workers' time goes",
      data.breakdown.length
        ? P.csvLink("time", () => [
            ["policy", ...P.SHOWN_KINDS],
            ...data.breakdown.map((row) => [row.label, ...P.SHOWN_KINDS.map((kind) => row.seconds[kind])]),
          ])
        : null,
    );
    const kinds = P.SHOWN_KINDS.filter((kind) => data.breakdown.some((row) => row.shares[kind] > 0));
    P.responsive(parts.body, () =>
      P.drawBars(
        parts.body,
        {
          rows: data.breakdown.map((row) => ({
            label: row.label,
            text: `${P.percent(row.shares.computing)} computing`,
            parts: kinds.map((kind) => ({
              kind,
              value: row.shares[kind],
              text: `${kind}: ${P.percent(row.shares[kind], 1)}, ${P.quantity(row.seconds[kind], "seconds")}`,
            })),
          })),
        },
        {
          kinds,
          label: `Shares of the workers' time: ${data.breakdown.map((row) => `${row.label} ${P.percent(row.shares.computing)} computing, ${P.percent(row.shares.waiting)} waiting`).join("; ")}`,
          empty: "No run tells what its workers' time went into.",
        },
      ),
    );
    const figures = [
      [
        "Throughput",
        "examples_per_second",
        (value) => `${P.number(value)} examples/s`,
        "No run tells of its examples.",
        NaN,
      ],
      [
        "Scaling efficiency",
        "efficiency",
        (value) => P.percent(value),
        "There is no run of one worker to compare with.",
        1,
      ],
    ].map(([title, key, show, empty, mark]) => {
      const { whole, body } = panel(title);
      const rows = data.summary
        .map((row, k) => ({ label: row.label, style: k, value: row[key] }))
        .filter((row) => Number.isFinite(row.value));
      const total = Math.max(...rows.map((row) => row.value), Number.isFinite(mark) ? 1.02 * mark : 0);
      P.responsive(body, () =>
        P.drawBars(
          body,
          {
            total,
            mark,
            rows: rows.map((row) => ({
              label: row.label,
              text: show(row.value),
              parts: [{ style: row.style, value: row.value }],
            })),
          },
          { label: `${title}: ${rows.map((row) => `${row.label} ${show(row.value)}`).join("; ")}`, empty },
        ),
      );
      return whole;
    });
    const text =
      data.summary.some((row) => Number.isFinite(row.efficiency)) &&
      "Efficiency is the throughput over that of one worker times the number of workers; the dashed line is 100 %.";
    return section(
      "Speed",
      null,
      parts.whole,
      html("div", { class: "grid-2" }, figures),
      text ? html("p", { class: "hint muted" }, text) : null,
    );
  }

  function staleness(data) {
    const rows = () => [
      ["policy", "staleness", "pushes"],
      ...data.staleness.flatMap((each) => each.counts.map((count, k) => [each.label, k, count])),
    ];
    const { whole, body } = panel("Pushes by staleness", data.staleness.length ? P.csvLink("staleness", rows) : null);
    P.responsive(body, () =>
      P.drawHistogram(
        body,
        { panels: data.staleness },
        { xLabel: "staleness (commits)", empty: "No run has a server, so no gradient is stale." },
      ),
    );
    return section(
      "Staleness",
      "Commits between the read of the parameters and the commit that uses the result.",
      whole,
    );
  }

  // The timeline ------------------------------------------------------------------------------------------------

  function timeline(data) {
    const title = "Timeline";
    if (!data.timelines.length)
      return section(title, null, html("p", { class: "empty" }, "No run has a timeline of its workers."));
    const several = data.timelines.length > 1;
    const text =
      "Each row is a worker; only in the time of computing does it make progress. Gaps are what is no part of a step: " +
      "evaluations, checkpoints, the start." +
      (several ? " A second run is drawn on the same scale of time." : "");
    const ofSeveral = (each) => each.data.workers.length > 1;
    const first = Math.max(0, data.timelines.findIndex(ofSeveral));
    const { label } = data.timelines[first];
    const second = data.timelines.findIndex((each) => ofSeveral(each) && each.label !== label);
    const rows = several
      ? [timelineRow(data, "Run", first, false), timelineRow(data, "Beside it", second, true)]
      : [timelineRow(data, null, 0, false)];
    P.shownTimelines = [];
    const show = () => {
      const shown = rows.filter((row) => row.chosen() !== null);
      const seconds = Math.max(...shown.map((row) => row.chosen().data.seconds));
      for (const row of rows) row.show(seconds, (view) => rows.forEach((other) => other !== row && other.follow(view)));
      P.shownTimelines = shown.map((row) => row.drawn());
    };
    rows.forEach((row) => row.select.addEventListener("change", show));
    show();
    return section(
      title,
      text,
      rows.map((row) => row.whole),
    );
  }

  // One run's timeline, with its chooser and the sums of its workers.
  function timelineRow(data, title, first, optional) {
    const name = (each) => (each.seed === null ? each.label : `${each.label}, seed ${each.seed}`);
    const select = html(
      "select",
      {},
      optional ? html("option", { value: "" }, "no other run") : null,
      data.timelines.map((each, k) => html("option", { value: k, selected: k === first }, name(each))),
    );
    const body = html("div", { class: "timeline" });
    const note = html("p", { class: "hint muted" });
    const sums = html("details", {}, html("summary", {}, "Seconds of each worker"), html("div", { class: "scrolled" }));
    const printed = html("h3", { class: "printed" });
    const heading = title
      ? [html("div", { class: "controls" }, html("label", {}, title, select)), printed]
      : html("h3", {}, name(data.timelines[0]));
    const shownPart = html("div", { hidden: optional }, body, note, sums);
    const chosen = () => (select.value === "" ? null : data.timelines[select.value]);
    let drawn = null;
    let before = null;
    const show = (seconds, onView) => {
      const each = chosen();
      shownPart.hidden = each === null;
      printed.textContent = each === null ? "" : name(each);
      if (each === null) return;
      const spans = { ...each.data, seconds };
      drawn ??= P.drawTimeline(body, spans, { onView });
      drawn.update(spans);
      if (each !== before) drawn.reset();
      before = each;
      const merged = spans.merged ? "Short spans are merged; a column shows their shares above each other. " : "";
      note.textContent = `${merged}${spans.hidden ? `${spans.hidden} more workers are not drawn.` : ""}`;
      sums.lastElementChild.replaceChildren(sumsTable(spans));
    };
    const follow = (view) => chosen() && drawn?.follow(view);
    return {
      whole: html("div", { class: "timeline-row" }, heading, shownPart),
      select,
      chosen,
      show,
      follow,
      drawn: () => drawn,
    };
  }

  function sumsTable(spans) {
    const head = html(
      "tr",
      {},
      ["worker", ...P.SHOWN_KINDS].map((name) => html("th", { scope: "col" }, name)),
    );
    const rows = P.timelineSums(spans).map((worker) =>
      html(
        "tr",
        {},
        html("th", { scope: "row" }, String(worker.rank)),
        worker.seconds.map((each) => html("td", {}, P.fixed(each))),
      ),
    );
    return html("table", {}, html("thead", {}, head), html("tbody", {}, rows));
  }

  function changes(data) {
    const { rows, more } = data.changes;
    const title = "Births and deaths";
    if (!rows.length) return section(title, "All workers were there from the start to the end.");
    const columns = ["at", "worker", "what", "run"];
    const lines = rows.map((row) =>
      html(
        "tr",
        {},
        [
          P.quantity(row.seconds, "seconds"),
          `worker ${row.worker}`,
          row.what === "joined" && row.incarnation ? `joined again (incarnation ${row.incarnation})` : row.what,
          row.seed === null ? row.label : `${row.label}, seed ${row.seed}`,
        ].map((text, k) => html("td", { class: k < 2 ? "left whole" : "left" }, text)),
      ),
    );
    const head = html(
      "tr",
      {},
      columns.map((name) => html("th", { scope: "col", class: "left" }, name)),
    );
    const table = html(
      "div",
      { class: "scrolled", tabindex: 0 },
      html("table", {}, html("thead", {}, head), html("tbody", {}, lines)),
    );
    return section(title, more ? `${more} more are not listed.` : null, table);
  }

  // The runs ----------------------------------------------------------------------------------------------------

  function runs(data) {
    const again = data.command ? [html("h3", {}, "All of it again"), html("pre", {}, data.command)] : [];
    const each = data.runs.map((run) => {
      const facts = [
        run.workers ? `${run.workers} worker${run.workers === 1 ? "" : "s"}` : null,
        run.steps === null ? null : `${P.number(run.steps, 9)} steps`,
        P.quantity(run.seconds, "seconds"),
        run.being_written ? "being written" : null,
      ];
      return html(
        "details",
        {},
        html(
          "summary",
          {},
          run.seed === null ? run.label : `${run.label}, seed ${run.seed}`,
          html("span", { class: "muted" }, ` · ${facts.filter(Boolean).join(" · ")}`),
        ),
        html("p", { class: "muted" }, run.path),
        run.notes.map((note) => html("p", {}, note)),
        run.command
          ? [html("h3", {}, "Run it again"), html("pre", {}, run.command)]
          : html("p", {}, data.command ? "It is made again with the comparison." : "Nothing tells how it was started."),
        html("h3", {}, "Configuration"),
        html("pre", {}, run.config),
      );
    });
    return section("Runs", null, again, each);
  }

  // The page ----------------------------------------------------------------------------------------------------

  // Canvases are pictures: on paper they must be light too.
  function lightOnPaper() {
    let before;
    addEventListener("beforeprint", () => {
      before = document.documentElement.dataset.theme;
      document.documentElement.dataset.theme = "light";
      P.shownTimelines?.forEach((each) => each.draw());
    });
    addEventListener("afterprint", () => {
      if (before) document.documentElement.dataset.theme = before;
      else delete document.documentElement.dataset.theme;
      P.shownTimelines?.forEach((each) => each.redraw());
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
      document.dispatchEvent(new Event("paceline-theme")),
    );
  }

  P.makeReport = (element, data) => {
    element.replaceChildren(...heading(data));
    const footer = html("footer", {}, `Made by Paceline ${data.paceline}. This file needs no network.`);
    if (data.runs.length) {
      for (const part of [summary, errors, speed, timeline, staleness, loss, changes, runs]) element.append(part(data));
    }
    element.append(footer);
  };

  const element = document.getElementById("report");
  if (element) {
    try {
      P.makeReport(element, JSON.parse(document.getElementById("data").textContent));
      lightOnPaper();
    } catch (error) {
      element.append(
        html("p", { class: "message failure", role: "alert" }, `The report could not be drawn: ${error.message}`),
      );
      throw error;
    }
  }
})();

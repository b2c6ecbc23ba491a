// Draws curves, bars and histograms as SVG, without any library. All functions are on the global object `Paceline`:
//
//   drawCurves(element, {series: [{label, style, x, y, low, high}], target, targetLabel}, options)
//   drawBars(element, {rows: [{label, text, parts: [{kind | style, value, text}]}], total}, options)
//   drawHistogram(element, {panels: [{label, style, counts, mean}]}, options)
//
// Each empties the element and draws into it at its present width, so it may be called again with other data, and
// `responsive(element, draw)` calls it again when the width changes. `style` is the number of a series: its colour,
// marker and dashes. Texts become text nodes alone, never markup.
"use strict";
(() => {
  const P = (globalThis.Paceline ??= {});
  const NAMESPACE = "http://www.w3.org/2000/svg";
  const DASHES = ["", "7 4", "2 3", "8 3 2 3"]; // the next when all colours are used, as in plots.py
  const NUM_COLOURS = 8;
  const LETTER = 6.6; // pixels of a letter of 12 px, about
  let numPatterns = 0;

  // Elements ----------------------------------------------------------------------------------------------------

  function append(element, children) {
    for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
    return element;
  }

  P.svg = (tag, attributes = {}, ...children) => {
    const element = document.createElementNS(NAMESPACE, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return append(element, children);
  };

  P.html = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    return append(element, children);
  };
  const { svg, html } = P;

  P.responsive = (element, draw) => {
    let width = 0;
    const observer = new ResizeObserver(() => {
      const now = Math.round(element.clientWidth);
      if (now > 0 && Math.abs(now - width) > 1) {
        width = now;
        requestAnimationFrame(draw);
      }
    });
    observer.observe(element);
    return observer;
  };

  // Numbers -----------------------------------------------------------------------------------------------------

  const UNITS = {
    seconds: [
      [1e-6, "µs"],
      [1e-3, "ms"],
      [1, "s"],
      [60, "min"],
      [3600, "h"],
    ],
    bytes: [
      [1, "B"],
      [1e3, "kB"],
      [1e6, "MB"],
      [1e9, "GB"],
      [1e12, "TB"],
    ],
    count: [
      [1, ""],
      [1e3, "thousand"],
      [1e6, "million"],
      [1e9, "billion"],
    ],
  };

  // The unit in which `value` has between about 2 and 2000 of them.
  P.unitFor = (kind, value) => {
    const units = UNITS[kind];
    if (!units) return { size: 1, name: kind ?? "" };
    const least = kind === "count" ? 10 : 2;
    let chosen = kind === "seconds" ? units[2] : units[0];
    if (kind === "seconds" && value > 0 && value < 1) chosen = value < 1e-3 ? units[0] : units[1];
    for (const unit of units) if (unit[0] > chosen[0] && value >= least * unit[0]) chosen = unit;
    return { size: chosen[0], name: chosen[1] };
  };

  P.number = (value, digits = 3) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e15 || size < 1e-6) return value.toExponential(Math.max(0, digits - 1));
    const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
    return value.toLocaleString("en", { maximumFractionDigits: Math.min(20, places), minimumFractionDigits: 0 });
  };

  // The same with all its digits, for columns of numbers.
  P.fixed = (value, digits = 3) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.max(1e-9, Math.abs(value)))));
    return value === 0
      ? "0"
      : value.toLocaleString("en", {
          maximumFractionDigits: Math.min(9, places),
          minimumFractionDigits: Math.min(9, places),
        });
  };

  P.quantity = (value, kind, digits = 3) => {
    if (value === null || !Number.isFinite(value)) return "–";
    const unit = P.unitFor(kind, Math.abs(value));
    return `${P.number(value / unit.size, digits)}${unit.name ? "\u00a0" + unit.name : ""}`;
  };

  P.percent = (share, digits = 0) => (Number.isFinite(share) ? `${(100 * share).toFixed(digits)}\u00a0%` : "–");

  // About `count` round numbers from `low` to `high`.
  P.ticks = (low, high, count) => {
    if (!(high > low)) return [low];
    const rough = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999) ?? 10 * power;
    const found = [];
    for (let tick = Math.ceil(low / step - 1e-9); tick * step <= high + 1e-9 * step; tick++) found.push(tick * step);
    return found;
  };

  function logTicks(low, high) {
    const found = [];
    const decades = Math.log10(high / low);
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      if (decades > 8 && power % 2) continue;
      for (const digit of decades <= 3 ? [1, 2, 5] : [1]) {
        const tick = digit * 10 ** power;
        if (tick >= low * 0.999 && tick <= high * 1.001) found.push(tick);
      }
    }
    return found.length >= 2 ? found : P.ticks(low, high, 4).filter((tick) => tick > 0);
  }

  // A scale from values to pixels: {at(value), ticks}.
  function makeScale(kind, low, high, from, to, count) {
    if (kind === "log") {
      const [a, b] = [Math.log(low), Math.log(high)];
      return { at: (value) => from + ((Math.log(value) - a) / (b - a)) * (to - from), ticks: logTicks(low, high) };
    }
    return { at: (value) => from + ((value - low) / (high - low)) * (to - from), ticks: P.ticks(low, high, count) };
  }

  function bounds(values, kind, fromZero) {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) {
      if (!Number.isFinite(value) || (kind === "log" && value <= 0)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (low > high) return kind === "log" ? [0.1, 1] : [0, 1];
    if (kind === "log") return low === high ? [low / 2, high * 2] : [low / 1.08, high * 1.08];
    if (fromZero && low > 0) low = 0;
    if (low === high) return [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    return [low, high + (high - low) * 0.04];
  }

  // Series ------------------------------------------------------------------------------------------------------

  P.colourClass = (style) => `series-${style % NUM_COLOURS}`;

  const MARKERS = [
    (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
    (r) => `M${-r},${-r}H${r}V${r}H${-r}Z`,
    (r) => `M0,${-1.2 * r}L${1.15 * r},${0.9 * r}H${-1.15 * r}Z`,
    (r) => `M0,${-1.3 * r}L${1.3 * r},0L0,${1.3 * r}L${-1.3 * r},0Z`,
    (r) => `M0,${1.2 * r}L${1.15 * r},${-0.9 * r}H${-1.15 * r}Z`,
    (r) =>
      `M${-r / 2.5},${-1.2 * r}h${r / 1.25}v${0.8 * r}h${0.8 * r}v${r / 1.25}h${-0.8 * r}v${0.8 * r}h${-r / 1.25}v${-0.8 * r}h${-0.8 * r}v${-r / 1.25}h${0.8 * r}Z`,
    (r) =>
      `M0,${-r / 2.2}L${r},${-1.3 * r}L${1.3 * r},${-r}L${r / 2.2},0L${1.3 * r},${r}L${r},${1.3 * r}L0,${r / 2.2}L${-r},${1.3 * r}L${-1.3 * r},${r}L${-r / 2.2},0L${-1.3 * r},${-r}L${-r},${-1.3 * r}Z`,
    (r) => {
      const spike = (k) => {
        const [radius, angle] = [k % 2 ? 0.55 * r : 1.4 * r, (Math.PI * k) / 5 - Math.PI / 2];
        return `${(radius * Math.cos(angle)).toFixed(2)},${(radius * Math.sin(angle)).toFixed(2)}`;
      };
      return `M${Array.from({ length: 10 }, (_, k) => spike(k)).join("L")}Z`;
    },
  ];

  P.marker = (style, x, y, radius = 3.4) =>
    svg("path", {
      class: `marker ${P.colourClass(style)}`,
      d: MARKERS[style % MARKERS.length](radius),
      transform: `translate(${x.toFixed(1)},${y.toFixed(1)})`,
    });

  // A list of the series under the figure, with line and marker.
  P.legend = (series) =>
    html(
      "ul",
      { class: "legend" },
      series.map((each) =>
        html(
          "li",
          {},
          svg(
            "svg",
            { width: 28, height: 12, "aria-hidden": "true" },
            svg("line", {
              class: `line ${P.colourClass(each.style)}`,
              x1: 1,
              x2: 27,
              y1: 6,
              y2: 6,
              "stroke-dasharray": dashes(each.style),
            }),
            P.marker(each.style, 14, 6),
          ),
          html("span", {}, each.label),
        ),
      ),
    );

  const dashes = (style) => DASHES[Math.floor(style / NUM_COLOURS) % DASHES.length] || "none";

  P.isEmpty = (element, text) => {
    element.replaceChildren(html("p", { class: "empty" }, text));
  };

  // Curves ------------------------------------------------------------------------------------------------------

  P.drawCurves = (element, data, options = {}) => {
    const series = data.series.filter((each) => each.x.length > 0);
    if (!series.length) return P.isEmpty(element, options.empty ?? "There are no points to draw.");
    const width = Math.max(240, element.clientWidth || 640);
    const height = options.height ?? Math.round(Math.min(380, Math.max(240, width * 0.58)));
    const yKind = options.yScale ?? "linear";
    const xUnit = P.unitFor(options.xUnit, Math.max(...series.map((each) => each.x[each.x.length - 1])));
    const usable = (y) => Number.isFinite(y) && (yKind !== "log" || y > 0);
    const ys = series.flatMap((each) => [...each.y, ...(each.low ?? []), ...(each.high ?? [])]);
    if (Number.isFinite(data.target)) ys.push(data.target);
    const [low, high] = bounds(ys, yKind, true);
    const [left, right] = bounds(
      series.flatMap((each) => each.x.map((x) => x / xUnit.size)),
      "linear",
      true,
    );
    const labels = endLabels(series, width, height, right * xUnit.size, options);
    const margin = { left: 56, right: labels ? labels.width : 14, top: 12, bottom: 44 };
    const inner = { right: width - margin.right, bottom: height - margin.bottom };
    const x = makeScale("linear", left, right, margin.left, inner.right, Math.max(4, (inner.right - margin.left) / 80));
    const y = makeScale(yKind, low, high, inner.bottom, margin.top, (inner.bottom - margin.top) / 48);
    const drawing = svg("svg", {
      class: "figure",
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      tabindex: 0,
      "aria-label":
        options.label ?? `${options.yLabel} against ${options.xLabel}: ${series.map((each) => each.label).join(", ")}`,
    });
    append(drawing, axes(x, y, margin, inner, width, options, xUnit));
    const targetLabel = [];
    if (Number.isFinite(data.target) && usable(data.target)) {
      const at = y.at(data.target);
      drawing.append(svg("line", { class: "target", x1: margin.left, x2: inner.right, y1: at, y2: at }));
      const place = { class: "target-label", x: inner.right - 4, y: at - 5, "text-anchor": "end" };
      targetLabel.push(svg("text", place, data.targetLabel ?? "target"));
    }
    for (const each of series) append(drawing, [band(each, x, y, xUnit, usable)]);
    for (const each of series) append(drawing, curve(each, x, y, xUnit, usable));
    append(drawing, targetLabel);
    if (labels) append(drawing, drawEndLabels(series, y, margin, inner, usable));
    const reading = makeReading(drawing, series, x, y, xUnit, margin, inner, options);
    const legend = labels || (series.length === 1 && !options.alwaysLegend) ? [] : [P.legend(series)];
    element.replaceChildren(html("div", { class: "drawing" }, drawing, reading), ...legend);
  };

  function axes(x, y, margin, inner, width, options, xUnit) {
    const parts = [];
    for (const tick of y.ticks) {
      const at = y.at(tick).toFixed(1);
      parts.push(svg("line", { class: "grid", x1: margin.left, x2: inner.right, y1: at, y2: at }));
      parts.push(
        svg(
          "text",
          { class: "tick", x: margin.left - 8, y: at, dy: "0.35em", "text-anchor": "end" },
          options.yPercent ? P.percent(tick, tick < 0.01 && tick > 0 ? 1 : 0) : P.number(tick),
        ),
      );
    }
    for (const tick of x.ticks) {
      const at = x.at(tick).toFixed(1);
      parts.push(svg("line", { class: "notch", x1: at, x2: at, y1: inner.bottom, y2: inner.bottom + 4 }));
      parts.push(svg("text", { class: "tick", x: at, y: inner.bottom + 18, "text-anchor": "middle" }, P.number(tick)));
    }
    const middle = (margin.top + inner.bottom) / 2;
    const unit = xUnit.name ? ` (${xUnit.name})` : "";
    parts.push(svg("line", { class: "axis", x1: margin.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }));
    parts.push(
      svg(
        "text",
        { class: "axis-label", x: (margin.left + inner.right) / 2, y: inner.bottom + 37, "text-anchor": "middle" },
        `${options.xLabel ?? ""}${unit}`,
      ),
    );
    parts.push(
      svg(
        "text",
        { class: "axis-label", transform: `translate(13,${middle}) rotate(-90)`, "text-anchor": "middle" },
        options.yLabel ?? "",
      ),
    );
    return parts;
  }

  function band(each, x, y, xUnit, usable) {
    if (!each.low || !each.high) return null;
    const there = each.x.map((_, k) => k).filter((k) => usable(each.low[k]) && usable(each.high[k]));
    if (there.length < 2) return null;
    const place = (k, values) => `${x.at(each.x[k] / xUnit.size).toFixed(1)},${y.at(values[k]).toFixed(1)}`;
    const around = [...there.map((k) => place(k, each.high)), ...there.reverse().map((k) => place(k, each.low))];
    return svg("polygon", { class: `band ${P.colourClass(each.style)}`, points: around.join(" ") });
  }

  function curve(each, x, y, xUnit, usable) {
    let path = "";
    const drawn = [];
    each.x.forEach((value, k) => {
      if (!usable(each.y[k])) return;
      const place = [x.at(value / xUnit.size), y.at(each.y[k])];
      path += `${drawn.length ? "L" : "M"}${place[0].toFixed(1)},${place[1].toFixed(1)}`;
      drawn.push(place);
    });
    const every = drawn.length > 16 ? Math.ceil(drawn.length / 8) : 1; // few, at another place on each curve
    const last = drawn.length - 1;
    const marked = drawn.filter(
      (_, k) => every === 1 || k === last || (k % every === each.style % every && k < last - every / 2),
    );
    return [
      svg("path", { class: `line ${P.colourClass(each.style)}`, d: path, "stroke-dasharray": dashes(each.style) }),
      ...marked.map(([a, b]) => P.marker(each.style, a, b)),
    ];
  }

  // Labels at the ends of the lines, if all lines end at the right and there is room for them; else there is a legend.
  function endLabels(series, width, height, right, options) {
    const longest = Math.max(...series.map((each) => each.label.length)) * LETTER + 26;
    if (series.length === 1) return null;
    const apart = series.some((each) => each.x[each.x.length - 1] < 0.93 * right);
    if (apart || width < 560 || longest > width * 0.3 || series.length * 16 > height - 60) return null;
    return { width: Math.ceil(longest) };
  }

  function drawEndLabels(series, y, margin, inner, usable) {
    const ends = series.map((each) => {
      const last = each.y.findLastIndex(usable);
      return { each, y: last < 0 ? inner.bottom : y.at(each.y[last]) };
    });
    ends.sort((a, b) => a.y - b.y);
    for (let k = 1; k < ends.length; k++) ends[k].y = Math.max(ends[k].y, ends[k - 1].y + 16);
    const over = ends[ends.length - 1].y - inner.bottom;
    if (over > 0) {
      ends[ends.length - 1].y -= over;
      for (let k = ends.length - 2; k >= 0; k--) ends[k].y = Math.min(ends[k].y, ends[k + 1].y - 16);
    }
    return ends.flatMap((end) => [
      P.marker(end.each.style, inner.right + 11, end.y),
      svg("text", { class: "end-label", x: inner.right + 20, y: end.y, dy: "0.35em" }, end.each.label),
    ]);
  }

  // The values under the pointer, or moved by the arrow keys.
  function makeReading(drawing, series, x, y, xUnit, margin, inner, options) {
    const box = html("div", { class: "reading", hidden: true, role: "status" });
    const line = svg("line", { class: "cursor", y1: margin.top, y2: inner.bottom, visibility: "hidden" });
    drawing.append(line);
    const places = [...new Set(series.flatMap((each) => each.x))].sort((a, b) => a - b);
    let current = 0;
    const show = (place) => {
      current = place;
      const value = places[place];
      const at = x.at(value / xUnit.size);
      line.setAttribute("x1", at);
      line.setAttribute("x2", at);
      line.setAttribute("visibility", "visible");
      const rows = series.map((each) => [each, valueAt(each, value)]).filter(([, found]) => found !== null);
      box.replaceChildren(
        html("strong", {}, `${P.number(value / xUnit.size)} ${xUnit.name}`),
        ...rows.map(([each, found]) =>
          html(
            "span",
            {},
            html("i", { class: `swatch ${P.colourClass(each.style)}` }),
            `${each.label}: ${options.yPercent ? P.percent(found, 1) : P.number(found)}`,
          ),
        ),
      );
      box.hidden = false;
      const scale = drawing.clientWidth / drawing.viewBox.baseVal.width || 1;
      box.style.left = `${Math.min(at * scale + 12, Math.max(0, drawing.clientWidth - box.offsetWidth - 2))}px`;
      if (at * scale + 12 + box.offsetWidth > drawing.clientWidth)
        box.style.left = `${Math.max(0, at * scale - box.offsetWidth - 12)}px`;
    };
    const hide = () => {
      box.hidden = true;
      line.setAttribute("visibility", "hidden");
    };
    drawing.addEventListener("pointermove", (event) => {
      const area = drawing.getBoundingClientRect();
      const wanted = ((event.clientX - area.left) / area.width) * drawing.viewBox.baseVal.width;
      show(nearest(places, (value) => Math.abs(x.at(value / xUnit.size) - wanted)));
    });
    drawing.addEventListener("pointerleave", hide);
    drawing.addEventListener("blur", hide);
    drawing.addEventListener("keydown", (event) => {
      const step = {
        ArrowLeft: -1,
        ArrowRight: 1,
        PageUp: -20,
        PageDown: 20,
        Home: -places.length,
        End: places.length,
      }[event.key];
      if (event.key === "Escape") hide();
      if (step === undefined) return;
      event.preventDefault();
      show(Math.min(places.length - 1, Math.max(0, current + step)));
    });
    return box;
  }

  function nearest(values, distance) {
    let best = 0;
    for (let k = 1; k < values.length; k++) if (distance(values[k]) < distance(values[best])) best = k;
    return best;
  }

  function valueAt(each, x) {
    const last = each.x.length - 1;
    if (last < 0 || x < each.x[0] || x > each.x[last]) return null;
    let above = each.x.findIndex((value) => value >= x);
    if (each.x[above] === x || above === 0) return each.y[above];
    const share = (x - each.x[above - 1]) / (each.x[above] - each.x[above - 1]);
    return each.y[above - 1] + share * (each.y[above] - each.y[above - 1]);
  }

  // Bars --------------------------------------------------------------------------------------------------------

  // Patterns over the colours of the parts of a worker's time, for those who cannot distinguish the colours.
  P.kindFills = () => {
    const name = `kind-${numPatterns++}`;
    const hatch = (kind, path) =>
      svg(
        "pattern",
        { id: `${name}-${kind}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
        svg("rect", { width: 6, height: 6, class: `kind-${kind}` }),
        svg("path", { d: path, class: "hatch" }),
      );
    const defs = svg(
      "defs",
      {},
      hatch("cancelled", "M-1,7L7,-1M-1,1L1,-1M5,7L7,5"),
      hatch("dead", "M0,0L6,6M6,0L0,6"),
      hatch("exchanging", "M0,3H6"),
    );
    const patterned = new Set(["cancelled", "dead", "exchanging"]);
    return {
      defs,
      fill: (kind) => (patterned.has(kind) ? { fill: `url(#${name}-${kind})` } : { class: `kind-${kind}` }),
    };
  };

  P.kindLegend = (kinds) =>
    html(
      "ul",
      { class: "legend" },
      kinds.map((kind) => {
        const { defs, fill } = P.kindFills();
        const sample = svg(
          "svg",
          { width: 18, height: 12, "aria-hidden": "true" },
          defs,
          svg("rect", { width: 18, height: 12, rx: 2, ...fill(kind) }),
        );
        return html("li", {}, sample, html("span", {}, kind));
      }),
    );

  // Horizontal bars: one for each row, made of parts. `total` is the length of the whole width.
  P.drawBars = (element, data, options = {}) => {
    if (!data.rows.length) return P.isEmpty(element, options.empty ?? "There is nothing to draw.");
    const width = Math.max(240, element.clientWidth || 640);
    const [each, bar] = [46, 16];
    const height = data.rows.length * each + (options.axis ? 30 : 2);
    const total =
      data.total ?? Math.max(...data.rows.map((row) => row.parts.reduce((sum, part) => sum + (part.value || 0), 0)));
    const { defs, fill } = P.kindFills();
    const drawing = svg(
      "svg",
      { class: "figure", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.label ?? "" },
      defs,
    );
    data.rows.forEach((row, number) => {
      const top = number * each;
      drawing.append(
        svg(
          "text",
          { class: "bar-label", x: 0, y: top + 14 },
          shorten(row.label, width - 12 * String(row.text ?? "").length),
        ),
        svg("text", { class: "bar-value", x: width, y: top + 14, "text-anchor": "end" }, row.text ?? ""),
        svg("rect", { class: "bar-ground", x: 0, y: top + 21, width, height: bar, rx: 3 }),
      );
      let start = 0;
      for (const part of row.parts) {
        if (!(part.value > 0) || !(total > 0)) continue;
        const length = (part.value / total) * width;
        const look = part.kind ? fill(part.kind) : { class: `fill ${P.colourClass(part.style ?? 0)}` };
        const piece = svg("rect", {
          x: start.toFixed(2),
          y: top + 21,
          width: Math.max(0.5, length).toFixed(2),
          height: bar,
          ...look,
        });
        if (part.text) piece.append(svg("title", {}, part.text));
        drawing.append(piece);
        start += length;
      }
      if (Number.isFinite(data.mark) && total > 0) {
        const at = (data.mark / total) * width;
        drawing.append(svg("line", { class: "target", x1: at, x2: at, y1: top + 18, y2: top + 40 }));
      }
    });
    element.replaceChildren(drawing, ...(options.kinds ? [P.kindLegend(options.kinds)] : []));
  };

  function shorten(text, pixels) {
    const letters = Math.max(6, Math.floor(pixels / 7));
    return text.length > letters ? `${text.slice(0, letters - 1)}…` : text;
  }

  // Histograms --------------------------------------------------------------------------------------------------

  const MOST_BINS = 40;

  function binned(counts) {
    const size = Math.ceil(counts.length / MOST_BINS);
    const bins = [];
    for (let k = 0; k < counts.length; k += size) bins.push(counts.slice(k, k + size).reduce((a, b) => a + b, 0));
    return { size, bins };
  }

  // A small histogram for each panel, all with the same axes; the counts are of the values 0, 1, 2, ...
  P.drawHistogram = (element, data, options = {}) => {
    const panels = data.panels.filter((panel) => panel.counts.length > 0);
    if (!panels.length) return P.isEmpty(element, options.empty ?? "There is nothing to count.");
    const most = Math.max(...panels.map((panel) => panel.counts.length));
    const shared = panels.map((panel) => {
      const { size, bins } = binned([...panel.counts, ...Array(most - panel.counts.length).fill(0)]);
      const total = bins.reduce((a, b) => a + b, 0) || 1;
      return { ...panel, size, shares: bins.map((count) => count / total) };
    });
    const top = Math.max(...shared.flatMap((panel) => panel.shares));
    const grid = html("div", { class: "multiples" });
    element.replaceChildren(grid);
    const fitting = Math.floor((element.clientWidth || 640) / 250);
    const columns = Math.max(1, Math.min(Math.max(2, shared.length), fitting));
    grid.style.setProperty("--columns", columns);
    const width = Math.max(200, Math.floor((element.clientWidth || 640) / columns) - 20);
    for (const panel of shared) grid.append(histogramPanel(panel, width, top, options));
  };

  function histogramPanel(panel, width, top, options) {
    const height = 170;
    const margin = { left: 44, right: 8, top: 8, bottom: 42 };
    const inner = { right: width - margin.right, bottom: height - margin.bottom };
    const count = panel.shares.length;
    const each = (inner.right - margin.left) / count;
    const y = makeScale("linear", 0, top * 1.05, inner.bottom, margin.top, 3);
    const drawing = svg("svg", {
      class: "figure",
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `${panel.label}: ${options.xLabel ?? ""}, mean ${P.number(panel.mean)}`,
    });
    for (const tick of y.ticks) {
      const at = y.at(tick).toFixed(1);
      drawing.append(svg("line", { class: "grid", x1: margin.left, x2: inner.right, y1: at, y2: at }));
      drawing.append(
        svg("text", { class: "tick", x: margin.left - 6, y: at, dy: "0.35em", "text-anchor": "end" }, P.percent(tick)),
      );
    }
    panel.shares.forEach((share, k) => {
      const name = panel.size === 1 ? `${k}` : `${k * panel.size} to ${(k + 1) * panel.size - 1}`;
      const bar = svg("rect", {
        class: `fill ${P.colourClass(panel.style)}`,
        x: (margin.left + k * each + each * 0.08).toFixed(2),
        width: (each * 0.84).toFixed(2),
        y: y.at(share).toFixed(2),
        height: Math.max(0, inner.bottom - y.at(share)).toFixed(2),
      });
      bar.append(svg("title", {}, `${name}: ${P.percent(share, 1)}`));
      drawing.append(bar);
    });
    const every = Math.ceil(count / Math.max(1, Math.floor((inner.right - margin.left) / 32)));
    for (let k = 0; k < count; k += every) {
      drawing.append(
        svg(
          "text",
          {
            class: "tick",
            x: (margin.left + (k + 0.5) * each).toFixed(1),
            y: inner.bottom + 16,
            "text-anchor": "middle",
          },
          `${k * panel.size}`,
        ),
      );
    }
    drawing.append(
      svg("line", { class: "axis", x1: margin.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }),
    );
    drawing.append(
      svg(
        "text",
        { class: "axis-label", x: (margin.left + inner.right) / 2, y: inner.bottom + 35, "text-anchor": "middle" },
        `${options.xLabel ?? ""}${panel.size > 1 ? `, ${panel.size} in a bar` : ""}`,
      ),
    );
    const title = html(
      "figcaption",
      {},
      panel.label,
      html("span", { class: "muted" }, ` mean ${P.number(panel.mean)}`),
    );
    return html("figure", { class: "multiple" }, title, drawing);
  }
})();

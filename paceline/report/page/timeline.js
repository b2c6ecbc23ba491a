// Draws what every worker did, on a canvas that can be zoomed and moved:
//
//   const timeline = Paceline.drawTimeline(element, data, options)
//   timeline.update(data)     other data, such as those of another run, or of the same run a second later
//   timeline.zoom(factor), timeline.show(from, to), timeline.reset(), timeline.follow(view), timeline.redraw()
//   timeline.view             {from, to} in seconds, and `end`, the end of the run
//
// `data` is {seconds, quantum, workers: [{rank, start, duration, kind, step, shares, counts}]}, as spans.py packs it:
// base64 of little-endian arrays, times in quanta. Kind 7 is a mixture of `counts` short spans, whose four `shares` are
// those of the kinds 0 to 3, of 255.
"use strict";
(() => {
  const P = (globalThis.Paceline ??= {});
  const { html } = P;
  const KINDS = ["computing", "waiting", "exchanging", "cancelled", "joined", "left", "dead"];
  const [BEGAN, LEFT, DEAD, MIXTURE] = [4, 5, 6, 7];
  const PARTS = 5; // the first four kinds, and dead
  const SHOWN = ["computing", "waiting", "exchanging", "cancelled", "dead"];
  const AXIS = 26;
  const ROW = { most: 26, least: 5, room: 560 };

  function bytes(text) {
    if (!text) return new Uint8Array(0);
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    const letters = atob(text);
    const found = new Uint8Array(letters.length);
    for (let k = 0; k < letters.length; k++) found[k] = letters.charCodeAt(k);
    return found;
  }

  const words = (text) => new Uint32Array(bytes(text).buffer);

  function unpack(data) {
    return data.workers.map((worker) => {
      const [start, duration, step, kind] = [
        words(worker.start),
        words(worker.duration),
        words(worker.step),
        bytes(worker.kind),
      ];
      const mixture = new Int32Array(kind.length); // the number of each mixture among them
      let mixtures = 0;
      for (let k = 0; k < kind.length; k++) if (kind[k] === MIXTURE) mixture[k] = mixtures++;
      const sums = new Float64Array(PARTS);
      const unpacked = {
        rank: worker.rank,
        start,
        duration,
        step,
        kind,
        mixture,
        shares: bytes(worker.shares),
        counts: words(worker.counts),
        sums,
      };
      for (let k = 0; k < kind.length; k++) addParts(unpacked, k, duration[k], sums, 0);
      return unpacked;
    });
  }

  // Add the time of a span to the parts from `place` on.
  function addParts(worker, k, length, sums, place) {
    const kind = worker.kind[k];
    if (kind === MIXTURE) {
      const from = 4 * worker.mixture[k];
      for (let part = 0; part < 4; part++) sums[place + part] += (length * worker.shares[from + part]) / 255;
    } else if (kind <= 3) sums[place + kind] += length;
    else if (kind === DEAD) sums[place + 4] += length;
  }

  // The last span that begins at or before a time in quanta; -1 if none does.
  function lastBefore(starts, time) {
    let [low, high] = [0, starts.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (starts[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  P.drawTimeline = (element, data, options = {}) => {
    const canvas = html("canvas", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": "timeline",
      class: "timeline-canvas",
    });
    const frame = html("div", { class: "timeline-frame" }, canvas);
    const box = html("div", { class: "reading", hidden: true });
    const spoken = html("p", { class: "visually-hidden", role: "status" });
    const where = html("span", { class: "muted where" });
    const legend = P.kindLegend(SHOWN);
    const button = (text, name, action) => {
      const made = html("button", { type: "button", title: name, "aria-label": name }, text);
      made.addEventListener("click", action);
      return made;
    };
    const controls = html(
      "div",
      { class: "controls" },
      button("+", "zoom in", () => zoom(0.5)),
      button("−", "zoom out", () => zoom(2)),
      button("←", "earlier", () => move(-0.3)),
      button("→", "later", () => move(0.3)),
      button("whole run", "show the whole run", () => reset()),
      where,
    );
    const help = html(
      "p",
      { class: "muted hint" },
      "Drag to move, pinch to zoom. Click it, then turn the wheel or press + and −; arrows move, 0 shows all, comma and full stop go from span to span.",
    );
    element.replaceChildren(controls, html("div", { class: "drawing" }, frame, box), legend, help, spoken);

    const pen = canvas.getContext("2d");
    let workers = [];
    let view = { from: 0, to: 1, end: 1 };
    let size = { width: 0, left: 0, right: 0, row: ROW.most };
    let colours = {};
    let chosen = null; // {row, k}: the span that the keyboard is on
    let waiting = false;

    function update(next) {
      const whole = !workers.length || (view.from <= 0 && view.to >= view.end);
      data = next;
      workers = unpack(next);
      chosen = null;
      const end = Math.max(next.seconds, 1e-6);
      view = whole ? { from: 0, to: end, end } : { ...view, end };
      canvas.setAttribute(
        "aria-label",
        `What ${workers.length} workers did in ${P.quantity(end, "seconds")}. The table below has the sums.`,
      );
      redraw();
    }

    function redraw() {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        draw();
      });
    }

    // Drawing ---------------------------------------------------------------------------------------------------

    function measure() {
      const width = Math.max(240, frame.clientWidth || 640);
      const row = Math.max(ROW.least, Math.min(ROW.most, Math.floor(ROW.room / Math.max(1, workers.length))));
      const wide = width >= 640;
      size = {
        width,
        left: width < 480 ? 34 : 74,
        right: wide ? 76 : 8,
        row,
        height: workers.length * row + AXIS,
        wide,
      };
      const dots = globalThis.devicePixelRatio || 1;
      canvas.width = Math.round(width * dots);
      canvas.height = Math.round(size.height * dots);
      canvas.style.height = `${size.height}px`;
      pen.setTransform(dots, 0, 0, dots, 0, 0);
    }

    function readColours() {
      const read = (name) => {
        const probe = html("i", { class: `probe probe-${name}` });
        element.append(probe);
        const found = getComputedStyle(probe).color;
        probe.remove();
        return found;
      };
      for (const name of [...SHOWN, "text", "muted", "grid", "ground", "hatch", "accent"]) colours[name] = read(name);
      colours.cancelledHatch = hatched(colours.cancelled, colours.hatch, false);
      colours.deadHatch = hatched(colours.dead, colours.hatch, true);
    }

    function hatched(ground, stroke, crossed) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 6;
      const brush = tile.getContext("2d");
      brush.fillStyle = ground;
      brush.fillRect(0, 0, 6, 6);
      brush.strokeStyle = stroke;
      brush.beginPath();
      for (const shift of [-6, 0, 6]) {
        brush.moveTo(shift, 6);
        brush.lineTo(shift + 6, 0);
        if (crossed) {
          brush.moveTo(shift, 0);
          brush.lineTo(shift + 6, 6);
        }
      }
      brush.stroke();
      return pen.createPattern(tile, "repeat");
    }

    const across = () => size.width - size.left - size.right;
    const toPixel = (seconds) => size.left + ((seconds - view.from) / (view.to - view.from)) * across();
    const toSeconds = (pixel) => view.from + ((pixel - size.left) / across()) * (view.to - view.from);

    function draw() {
      measure();
      readColours();
      pen.clearRect(0, 0, size.width, size.height);
      pen.font = "12px system-ui, sans-serif";
      drawAxis();
      workers.forEach((worker, row) => drawRow(worker, AXIS + row * size.row));
      drawNames();
      if (chosen) outline(chosen);
      const whole = view.from <= 0 && view.to >= view.end;
      where.textContent = whole
        ? `${P.quantity(view.end, "seconds")} in all`
        : `${time(view.from)} to ${time(view.to)} of ${P.quantity(view.end, "seconds")}`;
    }

    // A time, with as many digits as the view needs.
    function time(seconds) {
      const unit = P.unitFor("seconds", view.end);
      const places = Math.max(0, Math.min(9, 2 - Math.floor(Math.log10((view.to - view.from) / unit.size))));
      return `${(seconds / unit.size).toFixed(places)} ${unit.name}`;
    }

    function drawAxis() {
      const unit = P.unitFor("seconds", view.end);
      const ticks = P.ticks(view.from / unit.size, view.to / unit.size, across() / 90);
      const step = ticks.length > 1 ? ticks[1] - ticks[0] : 1;
      const places = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step) - 1e-9)));
      pen.textBaseline = "middle";
      ticks.forEach((tick, number) => {
        const x = toPixel(tick * unit.size);
        pen.fillStyle = colours.grid;
        pen.fillRect(Math.round(x), AXIS - 5, 1, size.height);
        const text = tick.toFixed(places) + (number === 0 ? ` ${unit.name}` : "");
        const half = pen.measureText(text).width / 2;
        pen.fillStyle = colours.muted;
        pen.textAlign = "center";
        pen.fillText(text, Math.max(size.left + half - 6, Math.min(size.width - size.right - half, x)), 10);
      });
      if (size.wide) {
        pen.textAlign = "right";
        pen.fillText("computing", size.width, 10);
      }
    }

    // Spans narrower than a pixel are summed up, and a pixel shows their shares above each other.
    function drawRow(worker, top) {
      const height = size.row > 8 ? size.row - 4 : size.row - 1;
      const [from, to] = [view.from / data.quantum, view.to / data.quantum];
      const perQuantum = across() / (to - from);
      const columns = Math.ceil(across());
      const sums = new Float64Array(columns * PARTS);
      let touched = false;
      pen.fillStyle = colours.ground;
      pen.fillRect(size.left, top + 1, across(), height);
      const marks = [];
      let k = lastBefore(worker.start, from);
      for (let back = 0; back < 32 && k > 0 && worker.start[k - 1] + worker.duration[k - 1] > from; back++) k--;
      for (k = Math.max(0, k); k < worker.start.length && worker.start[k] <= to; k++) {
        const kind = worker.kind[k];
        if (kind === BEGAN || kind === LEFT) {
          if (worker.start[k] >= from) marks.push([kind, (worker.start[k] - from) * perQuantum]);
          continue;
        }
        const begin = Math.max(0, (worker.start[k] - from) * perQuantum);
        const end = Math.min(across(), (worker.start[k] + worker.duration[k] - from) * perQuantum);
        if (end - begin >= 1.5) fillSpan(worker, k, size.left + begin, top + 1, end - begin, height);
        else if (end > begin) {
          addParts(worker, k, end - begin, sums, Math.min(columns - 1, Math.floor(begin)) * PARTS);
          touched = true;
        }
      }
      if (touched)
        for (let column = 0; column < columns; column++)
          fillParts(sums, column * PARTS, size.left + column, top + 1, 1, height);
      for (const [kind, x] of marks) drawMark(kind, size.left + x, top + 1, height);
    }

    function fillSpan(worker, k, x, y, width, height) {
      const kind = worker.kind[k];
      if (kind === MIXTURE) {
        const sums = new Float64Array(PARTS);
        addParts(worker, k, 1, sums, 0);
        fillParts(sums, 0, x, y, width, height);
        return;
      }
      const name = KINDS[kind];
      pen.fillStyle =
        width > 4 && name === "cancelled"
          ? colours.cancelledHatch
          : width > 4 && name === "dead"
            ? colours.deadHatch
            : colours[name];
      pen.fillRect(x, y, width > 3 ? width - 0.5 : width, height); // a hair between neighbours of one kind
    }

    function fillParts(sums, place, x, y, width, height) {
      let total = 0;
      for (let part = 0; part < PARTS; part++) total += sums[place + part];
      if (!(total > 0)) return;
      let below = y + height;
      for (let part = 0; part < PARTS; part++) {
        if (!sums[place + part]) continue;
        const share = (sums[place + part] / total) * height;
        pen.fillStyle = colours[SHOWN[part]];
        pen.fillRect(x, below - share, width, share);
        below -= share;
      }
    }

    function drawMark(kind, x, y, height) {
      const tall = Math.min(7, height);
      pen.fillStyle = colours.text;
      pen.beginPath();
      if (kind === BEGAN) {
        pen.moveTo(x, y);
        pen.lineTo(x + tall, y + tall / 2);
        pen.lineTo(x, y + tall);
      } else pen.rect(x - 2, y, 2, height);
      pen.fill();
    }

    function drawNames() {
      const every = Math.max(1, Math.ceil(13 / size.row));
      pen.textBaseline = "middle";
      workers.forEach((worker, row) => {
        if (row % every) return;
        const middle = AXIS + (row + 0.5) * size.row - 1;
        pen.fillStyle = chosen && chosen.row === row ? colours.accent : colours.text;
        pen.textAlign = "left";
        pen.fillText(size.left > 40 ? `worker ${worker.rank}` : `${worker.rank}`, 0, middle);
        if (!size.wide) return;
        const total = worker.sums.reduce((a, b) => a + b, 0);
        pen.fillStyle = colours.muted;
        pen.textAlign = "right";
        pen.fillText(total > 0 ? P.percent(worker.sums[0] / total) : "–", size.width, middle);
      });
    }

    function outline({ row, k }) {
      const worker = workers[row];
      const [a, b] = [worker.start[k] * data.quantum, (worker.start[k] + worker.duration[k]) * data.quantum];
      pen.strokeStyle = colours.text;
      pen.lineWidth = 2;
      pen.strokeRect(toPixel(a), AXIS + row * size.row, Math.max(2, toPixel(b) - toPixel(a)), size.row - 2);
    }

    // What is under the pointer ---------------------------------------------------------------------------------

    function describe(row, k) {
      const worker = workers[row];
      const [kind, length] = [worker.kind[k], worker.duration[k] * data.quantum];
      const from = `from ${time(worker.start[k] * data.quantum)}`;
      if (kind === BEGAN)
        return [`worker ${worker.rank}`, "joined", worker.step[k] ? `incarnation ${worker.step[k]}` : "", from];
      if (kind === LEFT) return [`worker ${worker.rank}`, "left", from];
      if (kind === DEAD) return [`worker ${worker.rank}`, "dead", P.quantity(length, "seconds"), from];
      if (kind !== MIXTURE)
        return [`worker ${worker.rank}, step ${worker.step[k]}`, KINDS[kind], P.quantity(length, "seconds"), from];
      const at = worker.mixture[k];
      const shares = [0, 1, 2, 3]
        .map((part) => [KINDS[part], worker.shares[4 * at + part] / 255])
        .filter(([, share]) => share > 0.002);
      return [
        `worker ${worker.rank}, from step ${worker.step[k]}`,
        `${worker.counts[at]} short spans in ${P.quantity(length, "seconds")}`,
        ...shares.map(([name, share]) => `${name} ${P.percent(share)}`),
        from,
      ];
    }

    function find(x, y) {
      const row = Math.floor((y - AXIS) / size.row);
      if (row < 0 || row >= workers.length || x < size.left - 4 || x > size.width - size.right + 4) return null;
      const worker = workers[row];
      const near = ((view.to - view.from) / across()) * 3;
      const at = toSeconds(x);
      let k = lastBefore(worker.start, (at + near) / data.quantum);
      let best = null;
      for (let back = 0; back < 8 && k >= 0; back++, k--) {
        const [a, b] = [worker.start[k] * data.quantum, (worker.start[k] + worker.duration[k]) * data.quantum];
        if (worker.kind[k] === BEGAN || worker.kind[k] === LEFT) {
          if (Math.abs(a - at) <= near * 1.5) return { row, k };
        } else if (a <= at && at <= b) best ??= { row, k };
        else if (b >= at - near && a <= at + near) best ??= { row, k };
      }
      return best;
    }

    function tell(found, x, y) {
      if (!found) {
        box.hidden = true;
        return;
      }
      const [first, ...rest] = describe(found.row, found.k).filter(Boolean);
      box.replaceChildren(html("strong", {}, first), ...rest.map((text) => html("span", {}, text)));
      box.hidden = false;
      const room = frame.clientWidth - box.offsetWidth;
      box.style.left = `${Math.max(0, Math.min(room, x + 14))}px`;
      box.style.top = `${y - frame.scrollTop + 18}px`;
    }

    // Zooming and moving ----------------------------------------------------------------------------------------

    // Show what another timeline shows.
    function follow(other) {
      view = { ...view, from: other.from, to: other.to };
      redraw();
    }

    function show(from, to) {
      const least = Math.max(data.quantum * 10, view.end * 1e-7);
      const length = Math.min(view.end, Math.max(least, to - from));
      const start = Math.max(0, Math.min(view.end - length, from));
      view = { ...view, from: start, to: start + length };
      options.onView?.(view);
      redraw();
    }

    function zoom(factor, at = (view.from + view.to) / 2) {
      show(at - (at - view.from) * factor, at + (view.to - at) * factor);
    }

    const move = (share) => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));
    const reset = () => show(0, view.end);

    const pointers = new Map();
    const place = (event) => {
      const area = canvas.getBoundingClientRect();
      return { x: event.clientX - area.left, y: event.clientY - area.top };
    };
    canvas.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, place(event));
      canvas.setPointerCapture(event.pointerId);
      canvas.focus({ preventScroll: true });
    });
    canvas.addEventListener("pointermove", (event) => {
      const now = place(event);
      const before = pointers.get(event.pointerId);
      if (!before) return tell(find(now.x, now.y), now.x, now.y);
      if (pointers.size === 1) {
        const moved = ((before.x - now.x) / across()) * (view.to - view.from);
        show(view.from + moved, view.to + moved);
        box.hidden = true;
      } else if (pointers.size === 2) {
        const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, each]) => each);
        const [was, is] = [Math.abs(before.x - other.x), Math.abs(now.x - other.x)];
        if (was > 8 && is > 8) zoom(was / is, toSeconds((now.x + other.x) / 2));
      }
      pointers.set(event.pointerId, now);
    });
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, (event) => {
        const now = place(event);
        pointers.delete(event.pointerId);
        if (event.pointerType !== "mouse") tell(find(now.x, now.y), now.x, now.y);
      });
    }
    canvas.addEventListener("pointerleave", () => (box.hidden = true));
    canvas.addEventListener("dblclick", (event) => zoom(0.4, toSeconds(place(event).x)));
    canvas.addEventListener(
      "wheel",
      (event) => {
        const wanted = event.ctrlKey || event.metaKey || document.activeElement === canvas;
        if (!wanted) return; // else a reader who scrolls the page would be caught here
        event.preventDefault();
        const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
        if (sideways) move((event.deltaX || event.deltaY) / across());
        else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), toSeconds(place(event).x));
      },
      { passive: false },
    );
    canvas.addEventListener("blur", () => {
      chosen = null;
      redraw();
    });
    canvas.addEventListener("keydown", (event) => {
      const action = {
        ArrowLeft: () => move(-0.2),
        ArrowRight: () => move(0.2),
        "+": () => zoom(0.5),
        "=": () => zoom(0.5),
        "-": () => zoom(2),
        0: reset,
        Home: reset,
        Escape: () => canvas.blur(),
        ArrowUp: () => choose(-1, 0),
        ArrowDown: () => choose(1, 0),
        ",": () => choose(0, -1),
        ".": () => choose(0, 1),
      }[event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      action();
    });

    // Go to another worker or span, and say what it is.
    function choose(rows, spans) {
      if (!workers.length) return;
      const row = chosen ? Math.max(0, Math.min(workers.length - 1, chosen.row + rows)) : 0;
      const worker = workers[row];
      if (!worker.start.length) return;
      let k =
        chosen && !rows
          ? chosen.k + spans
          : lastBefore(worker.start, chosen ? workers[chosen.row].start[chosen.k] : view.from / data.quantum);
      k = Math.max(0, Math.min(worker.start.length - 1, k));
      chosen = { row, k };
      const [from, to] = [worker.start[k] * data.quantum, (worker.start[k] + worker.duration[k]) * data.quantum];
      const length = view.to - view.from;
      if (to < view.from || from > view.to) show(from - length / 2, from + length / 2);
      redraw();
      spoken.textContent = describe(row, k).filter(Boolean).join(", ");
      tell(chosen, Math.max(size.left, toPixel(Math.max(from, view.from))), AXIS + row * size.row);
    }

    const observer = P.responsive(frame, redraw);
    document.addEventListener("paceline-theme", redraw);
    update(data);
    return {
      update,
      zoom,
      follow,
      show,
      reset,
      redraw,
      draw,
      observer,
      get view() {
        return { ...view };
      },
    };
  };

  // Seconds by kind of every worker, for a table beside the picture.
  P.timelineSums = (data) =>
    unpack(data).map((worker) => ({
      rank: worker.rank,
      seconds: SHOWN.map((_, part) => worker.sums[part] * data.quantum),
    }));
  P.SHOWN_KINDS = SHOWN;
})();

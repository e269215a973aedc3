// A chart over the steps, drawn from its numbers for the steps that are seen. The page comes with the charts of
// all steps, drawn by plots.py; this draws them anew in the same way.
"use strict";

const X_TICKS = (width) => (width > 500 ? 8 : 4);
const BAR_PX = 4;

// What series.py has packed: numbers that count up by one, or base64 of zlib of the bytes of float32, all first
// bytes first.
const unpacked = async (column) => {
  if (typeof column !== "string") return Float64Array.from({ length: column.count }, (_, i) => column.first + i);
  const text = atob(column);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const bytes = new Uint8Array(planes.length);
  const count = planes.length / 4;
  for (let i = 0; i < planes.length; i++) bytes[i] = planes[(i % 4) * count + (i >> 2)];
  return new Float32Array(bytes.buffer);
};

class Chart {
  constructor(numbers) {
    this.spec = JSON.parse(numbers.textContent);
    this.svgs = [...numbers.parentElement.querySelectorAll("svg.plot")];
    this.spoken = new Map(this.svgs.map((svg) => [svg, svg.getAttribute("aria-label")]));
    this.smoothed = new Map();
    for (const svg of this.svgs) {
      svg.setAttribute("tabindex", "0");
      // The crosshair tells the values; the browser would, too, a second later.
      for (const element of svg.querySelectorAll(".hit, title")) element.remove();
    }
  }

  // Unpack the numbers, once.
  load() {
    this.loading ??= (async () => {
      this.series = await Promise.all(
        this.spec.series.map(async (one) => ({
          ...one,
          x: await unpacked(one.x),
          columns: await Promise.all(one.columns.map(unpacked)),
          weights: one.weights && (await unpacked(one.weights)),
        })),
      );
      const lines = this.series.filter((one) => one.kind !== "dots").map((one) => one.x);
      const [longest] = [...lines].sort((a, b) => b.length - a.length);
      const same = lines.every((x) => x.length === longest.length && x[0] === longest[0]);
      this.x = same ? longest : Float64Array.from(new Set(lines.flatMap((x) => [...x]))).sort();
    })();
    return this.loading;
  }

  // How a series is drawn: its values, raw, and their means, if there are some.
  curves(one, smoothing) {
    const isAuto = smoothing === "auto";
    const isFixed = one.kind === "dots" || one.kind === "bars" || (one.kind === "band" && one.raw) || !one.window;
    if (isFixed || smoothing === "none" || (isAuto && one.window === 1)) return { raw: one.columns };
    if (!this.smoothed.has(one)) this.smoothed.set(one, {});
    const kept = this.smoothed.get(one);
    kept[smoothing] ??= one.columns.map((ys) =>
      isAuto ? runningMean(ys, one.window, one.weights) : movingAverage(ys, smoothing, one.weights),
    );
    return { raw: one.kind === "line" && (one.raw || !isAuto) ? one.columns : undefined, mean: kept[smoothing] };
  }

  draw({ from, to, smoothing }) {
    const isWhole = from === null;
    const [first, last] = isWhole ? this.spec.steps : [from, to];
    const marks = this.series.map((one) => {
      const rows = [rowAt(one.x, first), rowAt(one.x, last, true)];
      return { one, rows, ...this.curves(one, smoothing) };
    });
    for (const svg of this.svgs) {
      if (svg.getClientRects().length) this.drawInto(svg, marks, first, last, isWhole, smoothing);
    }
  }

  drawInto(svg, marks, first, last, isWhole, smoothing) {
    const area = svg.querySelector(".area");
    const { top, right, bottom } = Object.fromEntries(
      Object.entries(area.dataset).map(([name, text]) => [name, Number(text)]),
    );
    const bars = marks.filter(({ one }) => one.kind === "bars");
    const half = bars.length ? 0.5 : 0;
    const x = Axis.around(first - half, last + half, {
      tight: true, whole: true, numTicks: X_TICKS(svg.viewBox.baseVal.width),
    });
    const groups = bars.length ? Chart.groups(bars[0], svg) : undefined;
    const y = this.yAxis(marks, bars, groups, isWhole);
    const left = 16 + 6 * Math.max(0, ...y.ticks.map((tick) => y.text(tick).length));
    const frame = {
      x, y, left, top, right, bottom,
      px: (value) => left + x.fraction(value) * (right - left),
      py: (value) => bottom - y.fraction(value) * (bottom - top),
    };
    const drawn = [...Chart.axes(frame)];
    for (const mark of marks) {
      if (mark.one.kind === "bars") continue;
      drawn.push(...Chart.mark(mark, frame));
    }
    if (bars.length) drawn.push(...Chart.bars(bars, groups, frame));
    for (const [at, text] of this.spec.rules) {
      const py = frame.py(at);
      drawn.push(`<path class="rule" d="M${left} ${py}H${right}"/>`);
      drawn.push(`<text x="${right}" y="${py - 4}" text-anchor="end">${Chart.escaped(text)}</text>`);
    }
    area.innerHTML = drawn.join("");
    Object.assign(area.dataset, { left, from: x.low, to: x.high });
    this.key(svg, smoothing);
    const seen = isWhole ? "" : `. Shown: steps ${first} to ${last}`;
    svg.setAttribute("aria-label", this.spoken.get(svg) + seen);
    const note = svg.querySelector(".note");
    if (groups && note) {
      note.textContent = groups.size === 1 ? "seconds" : `seconds, bars: means of ${groups.size} steps`;
    }
  }

  // The key of the smoothed line: its words, and none where nothing is smoothed.
  key(svg, smoothing) {
    const key = svg.querySelector(".mean-key");
    if (!key) return;
    const text = key.querySelector("text");
    this.auto ??= text.textContent;
    text.textContent = { auto: this.auto, none: "" }[smoothing] ?? `EMA ${smoothing}`;
    key.setAttribute("visibility", text.textContent ? "visible" : "hidden");
  }

  // The y axis of what is seen; of all steps it begins at zero where plots.py has it so.
  yAxis(marks, bars, groups, isWhole) {
    const { log, percent, around, zero } = this.spec;
    let [low, high] = [Infinity, -Infinity];
    const hold = (value) => {
      if (!Number.isFinite(value) || (log && value <= 0)) return;
      if (value < low) low = value;
      if (value > high) high = value;
    };
    for (const { one, rows, raw, mean } of marks) {
      if (one.kind === "bars") continue;
      for (const ys of [...(raw ?? []), ...(mean ?? [])]) for (let i = rows[0]; i < rows[1]; i++) hold(ys[i]);
    }
    if (bars.length) for (const height of groups.heights(bars).map((parts) => parts.at(-1))) hold(height);
    around.forEach(hold);
    if (bars.length || (zero && isWhole)) hold(0);
    return Axis.around(low, high, { log, percent });
  }

  static *axes({ x, y, px, py, left, right, bottom }) {
    for (const tick of y.ticks) {
      yield `<path class="grid" d="M${left} ${py(tick).toFixed(1)}H${right}"/>`;
      yield `<text class="y-tick" x="${left - 6}" y="${py(tick).toFixed(1)}" dy="4" text-anchor="end">${y.text(tick)}</text>`;
    }
    for (const tick of x.ticks) {
      yield `<text class="x-tick" x="${px(tick).toFixed(1)}" y="${bottom + 16}" text-anchor="middle">${x.text(tick)}</text>`;
    }
  }

  static *mark({ one, rows, raw, mean }, frame) {
    if (one.kind === "band") yield* Chart.band(one, mean ?? raw, rows, frame);
    else if (one.kind === "dots") {
      for (let i = rows[0]; i < rows[1]; i++) {
        const at = Chart.point(one.x[i], raw[0][i], frame);
        if (at) yield `<circle class="dot f-${one.color}" cx="${at[0]}" cy="${at[1]}" r="3.5"/>`;
      }
    } else {
      if (raw) yield* Chart.line(one, raw[0], rows, frame, mean ? "faint" : "curve");
      if (mean) yield* Chart.line(one, mean[0], rows, frame, "curve");
    }
  }

  static *line(one, ys, rows, frame, style) {
    let run = [];
    const ended = () => {
      const points = run;
      run = [];
      if (points.length === 1) return `<circle class="f-${one.color}" cx="${points[0][0]}" cy="${points[0][1]}" r="2"/>`;
      return points.length ? `<path class="${style} s-${one.color}" d="M${points.map((p) => p.join(" ")).join("L")}"/>` : "";
    };
    for (const row of thin(ys, ...rows, (i) => Math.floor(frame.px(one.x[i])))) {
      const at = Chart.point(one.x[row], ys[row], frame);
      if (at) run.push(at);
      else yield ended();
    }
    yield ended();
  }

  static *band(one, [lows, highs], [first, end], frame) {
    const isGap = (i) => !Number.isFinite(lows[i] + highs[i]);
    const edge = (ys, start, stop) =>
      thin(ys, start, stop, (i) => Math.floor(frame.px(one.x[i])))
        .map((row) => Chart.point(one.x[row], ys[row], frame)?.join(" "))
        .filter(Boolean);
    for (let start = first; start < end; ) {
      let stop = start;
      while (stop < end && !isGap(stop)) stop++;
      const points = [...edge(highs, start, stop), ...edge(lows, start, stop).reverse()];
      if (points.length) yield `<path class="band f-${one.color}" d="M${points.join("L")}Z"/>`;
      start = stop + 1;
    }
  }

  // The steps that share a bar: as many as leave it wide enough.
  static groups({ one, rows: [first, end] }, svg) {
    const size = Math.max(1, Math.ceil((BAR_PX * (end - first)) / svg.viewBox.baseVal.width));
    const starts = [];
    for (let i = first; i < end; i += size) starts.push(i);
    const spans = starts.map((start) => [start, Math.min(start + size, end)]);
    const mean = (ys, [start, stop]) => {
      let sum = 0;
      for (let i = start; i < stop; i++) sum += ys[i];
      return sum / (stop - start);
    };
    // For each bar the height up to the end of each part.
    const heights = (bars) =>
      spans.map((span) => {
        let top = 0;
        return bars.map(({ one: part }) => (top += mean(part.columns[0], span)));
      });
    return { size, spans, heights, x: one.x, first, mean };
  }

  static *bars(bars, groups, { px, py }) {
    const gap = groups.spans.length <= 60 ? 1 : 0.4;
    for (const [i, tops] of groups.heights(bars).entries()) {
      const [start, stop] = groups.spans[i];
      const [left, right] = [px(groups.x[start] - 0.5), px(groups.x[stop - 1] + 0.5)];
      const width = Math.max(0.3, right - left - gap).toFixed(2);
      for (const [part, top] of tops.entries()) {
        const height = py(part ? tops[part - 1] : 0) - py(top);
        if (height <= 0) continue;
        yield `<rect class="f-${bars[part].one.color}" x="${left.toFixed(2)}" y="${py(top).toFixed(2)}" ` +
          `width="${width}" height="${height.toFixed(2)}"/>`;
      }
    }
  }

  static point(x, y, frame) {
    if (!Number.isFinite(y) || (frame.y.log && y <= 0)) return undefined;
    return [frame.px(x).toFixed(1), frame.py(y).toFixed(1)];
  }

  static escaped(text) {
    const element = document.createElement("i");
    element.textContent = text;
    return element.innerHTML;
  }

  // The values at a step: a title, and [colour, label, text] for each series that has some there.
  at(step, svg, { from, to, smoothing }) {
    const number = (value) => (this.spec.percent ? `${compact(100 * value, 4)}%` : compact(value, 4));
    const [first, last] = from === null ? this.spec.steps : [from, to];
    let title = `step ${step}`;
    const found = [];
    const lines = this.series.filter((one) => one.kind === "line"); // told first, and drawn last
    for (const one of [...lines, ...this.series.filter((one) => one.kind !== "line")]) {
      const row = rowAt(one.x, step);
      if (one.x[row] !== step) continue;
      if (one.kind === "bars") {
        const rows = [rowAt(one.x, first), rowAt(one.x, last, true)];
        const groups = Chart.groups({ one, rows }, svg);
        const span = groups.spans[Math.floor((row - groups.first) / groups.size)];
        if (groups.size > 1) title = `steps ${one.x[span[0]]} to ${one.x[span[1] - 1]}, mean`;
        found.push([one.color, one.label, number(groups.mean(one.columns[0], span))]);
        continue;
      }
      const { raw, mean } = this.curves(one, smoothing);
      const shown = one.kind === "band" ? mean ?? raw : one.columns;
      const text = shown.map((ys) => number(ys[row])).join(" to ");
      found.push([one.color, one.label, one.kind === "line" && mean ? `${text}, mean ${number(mean[0][row])}` : text]);
    }
    return { title, found };
  }
}

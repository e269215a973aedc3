// A crosshair with the values of a step, for mouse, touch and keyboard; and the choice of steps by dragging.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const DRAG_PX = 5; // less is a click

class Crosshair {
  // `view` says which steps are seen; `zoom(from, to)` is told those that a reader has chosen.
  constructor(view, zoom) {
    Object.assign(this, { view, zoom });
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.setAttribute("role", "status");
    this.tip.hidden = true;
    document.body.append(this.tip);
    this.line = document.createElementNS(SVG, "path");
    this.line.setAttribute("class", "cross");
    this.chosen = document.createElementNS(SVG, "rect");
    this.chosen.setAttribute("class", "chosen");
  }

  attach(chart) {
    for (const svg of chart.svgs) {
      let drag;
      svg.addEventListener("pointerdown", (event) => {
        if (event.button) return;
        drag = { start: this.pixel(svg, event) };
        this.show(chart, svg, this.stepAt(svg, drag.start));
      });
      svg.addEventListener("pointermove", (event) => {
        const pixel = this.pixel(svg, event);
        if (drag && (drag.moved ||= Math.abs(pixel - drag.start) > DRAG_PX)) {
          svg.setPointerCapture(event.pointerId); // so that it may end outside of the chart
          this.mark(svg, drag.start, pixel);
        }
        if (drag || event.pointerType !== "touch") this.show(chart, svg, this.stepAt(svg, pixel));
      });
      svg.addEventListener("pointerup", (event) => {
        const ended = drag;
        drag = undefined;
        this.chosen.remove();
        if (!ended?.moved) return;
        const ends = [ended.start, this.pixel(svg, event)].map((pixel) => this.stepAt(svg, pixel));
        this.hide();
        this.zoom(Math.min(...ends), Math.max(...ends));
      });
      // A finger that chooses must not begin a fling, whose end would swallow the next tap.
      svg.addEventListener("touchmove", (event) => drag?.moved && event.preventDefault(), { passive: false });
      svg.addEventListener("pointercancel", () => {
        drag = undefined;
        this.chosen.remove();
      });
      svg.addEventListener("pointerleave", (event) => {
        if (event.pointerType !== "touch" && !drag) this.hide();
      });
      svg.addEventListener("focus", () => svg.matches(":focus-visible") && this.show(chart, svg, this.step ?? Infinity));
      svg.addEventListener("blur", () => this.hide());
      svg.addEventListener("keydown", (event) => this.key(chart, svg, event));
    }
  }

  // Arrows, Home and End move the crosshair from step to step.
  key(chart, svg, event) {
    if (event.shiftKey || event.ctrlKey || event.altKey || event.metaKey || !chart.x) return;
    const row = rowAt(chart.x, this.step ?? Infinity);
    const rows = { ArrowLeft: row - 1, ArrowRight: row + 1, Home: 0, End: chart.x.length - 1 };
    if (!(event.key in rows)) return;
    event.preventDefault();
    const x = chart.x[Math.max(0, Math.min(chart.x.length - 1, rows[event.key]))];
    this.show(chart, svg, event.key === "Home" ? -Infinity : event.key === "End" ? Infinity : x);
  }

  frame(svg) {
    const { left, right, top, bottom, from, to } = svg.querySelector(".area").dataset;
    return Object.fromEntries(Object.entries({ left, right, top, bottom, from, to }).map(([k, v]) => [k, Number(v)]));
  }

  // Where a pointer is, in pixels of the drawing.
  pixel(svg, event) {
    const box = svg.getBoundingClientRect();
    return ((event.clientX - box.left) * svg.viewBox.baseVal.width) / box.width;
  }

  stepAt(svg, pixel) {
    const { left, right, from, to } = this.frame(svg);
    const at = Math.max(0, Math.min(1, (pixel - left) / (right - left)));
    return from + at * (to - from);
  }

  mark(svg, start, pixel) {
    const { left, right, top, bottom } = this.frame(svg);
    const ends = [start, pixel].map((value) => Math.max(left, Math.min(right, value)));
    const box = { x: Math.min(...ends), y: top, width: Math.abs(ends[0] - ends[1]), height: bottom - top };
    for (const [name, value] of Object.entries(box)) this.chosen.setAttribute(name, value);
    svg.append(this.chosen);
  }

  // Show the values at the step of the chart that is nearest to `wanted` among those that are seen.
  async show(chart, svg, wanted) {
    this.wanted = { chart, svg, wanted };
    await chart.load();
    if (this.wanted?.svg !== svg || this.wanted.wanted !== wanted) return; // something else by now
    const { left, right, top, bottom, from, to } = this.frame(svg);
    const [first, end] = [rowAt(chart.x, from), rowAt(chart.x, to, true)];
    if (first >= end) return this.hide();
    let row = Math.min(end - 1, Math.max(first, rowAt(chart.x, wanted)));
    if (row > first && wanted - chart.x[row - 1] < chart.x[row] - wanted) row -= 1;
    this.step = chart.x[row];
    const x = left + ((this.step - from) / (to - from)) * (right - left);
    this.line.setAttribute("d", `M${x.toFixed(1)} ${top}V${bottom}`);
    svg.append(this.line);
    this.tell(chart.at(this.step, svg, this.view), chart.spec.unit);
    const box = svg.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    const beside = box.left + x * scale + 10;
    const fits = beside + this.tip.offsetWidth < document.documentElement.clientWidth - 4;
    const place = fits ? beside : Math.max(4, beside - 20 - this.tip.offsetWidth);
    this.tip.style.left = `${place + scrollX}px`;
    this.tip.style.top = `${box.top + top * scale + scrollY}px`;
  }

  // Show what is shown once more, where it is now.
  again() {
    if (this.wanted) this.show(this.wanted.chart, this.wanted.svg, this.step);
  }

  tell({ title, found }, unit) {
    const head = document.createElement("b");
    head.textContent = title;
    const rows = found.map(([color, label, text]) => {
      const row = document.createElement("div");
      const key = document.createElement("i");
      key.className = `b-${color}`;
      row.append(key, ` ${label} ${text} ${unit}`.trimEnd());
      return row;
    });
    this.tip.replaceChildren(head, ...rows);
    this.tip.hidden = false;
  }

  hide() {
    this.wanted = undefined;
    this.line.remove();
    this.tip.hidden = true;
  }
}

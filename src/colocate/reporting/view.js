// Which steps the charts show and how curves are smoothed: one view for all charts, which the controls, a drag
// over a chart, keys and the address of the page change. The address keeps it, so that a link opens the same.
"use strict";
(() => {
  const form = document.getElementById("view");
  const charts = [...document.querySelectorAll("script.numbers")].map((numbers) => new Chart(numbers));
  if (!form || !charts.length) return;
  const { from, to, smoothing } = form.elements;
  const seen = document.getElementById("seen");
  const first = Math.min(...charts.map((chart) => chart.spec.steps[0]));
  const last = Math.max(...charts.map((chart) => chart.spec.steps[1]));
  const view = { from: null, to: null, smoothing: "auto" };

  // Only charts on the screen are drawn; the others when they come to it.
  const visible = new Set();
  const stale = new Set();
  const draw = async (chart) => {
    if (!stale.has(chart)) return;
    await chart.load();
    if (stale.delete(chart)) chart.draw(view);
  };
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const chart = charts.find(({ svgs }) => svgs.includes(target));
      if (isIntersecting) visible.add(target);
      else visible.delete(target);
      if (isIntersecting) draw(chart);
    }
  });
  const crosshair = new Crosshair(view, (start, end) => show(start, end));
  for (const chart of charts) {
    crosshair.attach(chart);
    for (const svg of chart.svgs) observer.observe(svg);
  }

  const fromAddress = () => {
    const told = new URLSearchParams(location.hash.slice(1));
    const steps = /^(\d+)-(\d+)$/.exec(told.get("steps") ?? "");
    const wanted = told.get("smoothing");
    const isKnown = [...smoothing.options].some(({ value }) => value === wanted);
    return { steps: steps ? [Number(steps[1]), Number(steps[2])] : [first, last], smoothing: isKnown ? wanted : "auto" };
  };

  const toAddress = () => {
    const parts = [];
    if (view.from !== null) parts.push(`steps=${view.from}-${view.to}`);
    if (view.smoothing !== "auto") parts.push(`smoothing=${view.smoothing}`);
    const hash = parts.length ? `#${parts.join("&")}` : "";
    if (hash !== location.hash) history.replaceState(null, "", hash || location.pathname + location.search);
  };

  const changed = () => {
    for (const chart of charts) {
      stale.add(chart);
      if (chart.svgs.some((svg) => visible.has(svg))) draw(chart);
    }
    const isWhole = view.from === null;
    from.value = isWhole ? first : view.from;
    to.value = isWhole ? last : view.to;
    smoothing.value = String(view.smoothing);
    for (const button of form.querySelectorAll("button")) {
      const isIdle = { in: !isWhole && view.to - view.from <= 1, out: isWhole, reset: isWhole,
        earlier: isWhole || view.from <= first, later: isWhole || view.to >= last }[button.dataset.do];
      button.setAttribute("aria-disabled", String(isIdle)); // not disabled, which would take the focus away
    }
    const steps = isWhole ? `All steps, ${first} to ${last}` : `Steps ${view.from} to ${view.to} of ${last}`;
    const how = { auto: "", none: ", not smoothed" }[view.smoothing] ?? `, smoothed by EMA ${view.smoothing}`;
    seen.textContent = steps + how;
    toAddress();
    crosshair.again();
  };

  // Show the steps from `start` to `end`, two at least; all if these are all.
  const show = (start, end) => {
    let low = Math.max(first, Math.round(start));
    let high = Math.min(last, Math.round(end));
    if (high <= low) [low, high] = [Math.max(first, Math.min(low, last) - 1), Math.min(last, Math.max(low, first) + 1)];
    const isWhole = low <= first && high >= last;
    Object.assign(view, isWhole ? { from: null, to: null } : { from: low, to: high });
    changed();
  };

  const acts = {
    in: ([low, high], at) => [at - (at - low) / 2, at + (high - at) / 2],
    out: ([low, high], at) => within(at - 2 * (at - low) - 1, at + 2 * (high - at) + 1),
    earlier: ([low, high]) => within(low - half(low, high), high - half(low, high)),
    later: ([low, high]) => within(low + half(low, high), high + half(low, high)),
    reset: () => [first, last],
  };
  const half = (low, high) => Math.max(1, Math.round((high - low) / 2));
  // A range that would leave the run is moved back into it, as wide as it was.
  const within = (low, high) => {
    const by = low < first ? first - low : Math.min(0, last - high);
    return [low + by, high + by];
  };
  const act = (name, at) => {
    const range = view.from === null ? [first, last] : [view.from, view.to];
    const middle = at !== undefined && at >= range[0] && at <= range[1] ? at : (range[0] + range[1]) / 2;
    show(...acts[name](range, middle));
  };

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", ({ target }) => {
    if (target === smoothing) {
      view.smoothing = Number(smoothing.value) || smoothing.value;
      changed();
    } else show(Number(from.value || first), Number(to.value || last));
  });
  form.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button && button.getAttribute("aria-disabled") !== "true") act(button.dataset.do);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.target.closest?.("#viewer")) {
      crosshair.hide();
      if (view.from !== null) act("reset");
    }
    if (!event.target.closest?.("svg.plot") || event.ctrlKey || event.altKey || event.metaKey) return;
    const shifted = event.shiftKey ? { ArrowLeft: "earlier", ArrowRight: "later" } : {};
    const name = { "+": "in", "=": "in", "-": "out", ...shifted }[event.key];
    if (!name) return;
    event.preventDefault();
    act(name, crosshair.step);
  });
  for (const { svgs } of charts) {
    for (const svg of svgs) svg.addEventListener("dblclick", () => act("reset"));
  }

  const follow = () => {
    const told = fromAddress();
    view.smoothing = Number(told.smoothing) || told.smoothing;
    show(...told.steps);
  };
  addEventListener("hashchange", follow);
  form.hidden = false;
  if (location.hash) follow();
  else {
    changed();
    stale.clear(); // the page comes with these drawings
  }
})();

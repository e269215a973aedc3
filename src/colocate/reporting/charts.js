// A crosshair with the values under it, for mouse, touch and keyboard. Each chart has a transparent column for
// every step that it can tell of (Plot.hover), whose <title> is the text.
"use strict";
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.setAttribute("role", "status");
  tip.hidden = true;
  document.body.append(tip);

  for (const svg of document.querySelectorAll("svg.plot")) {
    const columns = [...svg.querySelectorAll("rect.hit")];
    if (!columns.length) continue;
    const texts = columns.map((column) => {
      const title = column.querySelector("title");
      title.remove(); // else the browser shows it, too, a second later
      return title.textContent;
    });
    const cross = document.createElementNS("http://www.w3.org/2000/svg", "path");
    cross.setAttribute("class", "cross");
    svg.setAttribute("tabindex", "0");
    let at = columns.length - 1;

    const show = (index) => {
      at = Math.max(0, Math.min(columns.length - 1, index));
      const { x, y, width, height } = columns[at].getBBox();
      cross.setAttribute("d", `M${x + width / 2} ${y}v${height}`);
      svg.append(cross);
      tip.textContent = texts[at];
      tip.hidden = false;
      const box = columns[at].getBoundingClientRect();
      const left = box.left + box.width / 2 - tip.offsetWidth / 2;
      const most = document.documentElement.clientWidth - tip.offsetWidth - 4;
      tip.style.left = `${Math.max(4, Math.min(most, left)) + scrollX}px`;
      tip.style.top = `${box.top - tip.offsetHeight - 4 + scrollY}px`;
    };
    const hide = () => {
      cross.remove();
      tip.hidden = true;
    };
    svg.addEventListener("pointermove", (event) => {
      const index = columns.indexOf(event.target.closest("rect.hit"));
      if (index >= 0) show(index);
    });
    svg.addEventListener("pointerdown", (event) => {
      const index = columns.indexOf(event.target.closest("rect.hit"));
      if (index >= 0) show(index);
    });
    svg.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") hide();
    });
    svg.addEventListener("focus", () => svg.matches(":focus-visible") && show(at));
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: columns.length - 1 };
      if (event.key === "Escape") hide();
      if (!(event.key in moves)) return;
      event.preventDefault();
      show(moves[event.key]);
    });
  }
})();

// The viewer of completions: search, one step, one group, best or worst first. The records are in the page.
"use strict";
(() => {
  const records = JSON.parse(document.getElementById("completions").textContent);
  const form = document.getElementById("viewer");
  const list = document.getElementById("found");
  const count = document.getElementById("count");
  const more = document.getElementById("more");
  const PAGE = 20;
  let shown = PAGE;

  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const number = (value) => (typeof value === "number" ? +value.toPrecision(4) : "–");

  const draw = (record) => {
    const box = element("div", "sample");
    box.append(element("span", "chip", `step ${record.step}`), element("span", "chip", `group ${record.group}`));
    for (const [name, value] of Object.entries(record.scores)) {
      box.append(element("span", "chip", `${name} ${number(value)}`));
    }
    for (const [className, part] of [["prompt", "prompt"], ["", "completion"]]) {
      const pre = element("pre", className, record[part]);
      pre.lang = record[`${part}_lang`];
      pre.tabIndex = 0; // so that a keyboard can scroll it
      box.append(pre);
    }
    return box;
  };

  const update = () => {
    const words = form.elements.search.value.toLowerCase();
    const { step, group, order } = form.elements;
    const found = records.filter(
      (record) =>
        (!step.value || record.step === Number(step.value)) &&
        (!group.value || record.group === Number(group.value)) &&
        (!words || `${record.prompt}\n${record.completion}`.toLowerCase().includes(words)),
    );
    const by = { best: -1, worst: 1 }[order.value];
    if (by) found.sort((one, other) => by * (one.scores.advantage - other.scores.advantage));
    count.textContent = `${found.length} of ${records.length} completions`;
    list.replaceChildren(...found.slice(0, shown).map(draw));
    more.hidden = found.length <= shown;
  };

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    shown = PAGE;
    update();
  });
  more.addEventListener("click", () => {
    shown += PAGE;
    update();
  });
  update();
})();

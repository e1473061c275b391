"use strict";
// Charts: the pointer reads the nearest point of every line.
for (const figure of document.querySelectorAll(".chart")) {
  const chart = JSON.parse(figure.dataset.chart);
  const area = figure.querySelector(".area");
  const cursor = figure.querySelector(".cursor");
  const reading = figure.querySelector(".reading");
  const summary = reading.textContent;
  const nearest = (places, at) => {
    let low = 0, high = places.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (places[middle] < at) low = middle + 1; else high = middle;
    }
    return low > 0 && at - places[low - 1] < places[low] - at ? low - 1 : low;
  };
  const read = (event) => {
    const box = area.getBoundingClientRect();
    const at = 1000 * (event.clientX - box.left) / box.width;
    const first = chart.series[0], point = nearest(first.at, at);
    const words = chart.series.map((s) => {
      const i = nearest(s.at, at);
      const where = s === first ? "" : ` (${chart.axis} ${s.x[i]})`;
      return (chart.series.length > 1 ? s.label + " " : "") + s.words[i] + where;
    });
    const place = chart.axis === "step" ? `step ${first.x[point]}` : `${first.x[point]} ${chart.axis}`;
    reading.textContent = `${place}: ${words.join("; ")} ${chart.unit}`;
    cursor.hidden = false;
    cursor.style.left = first.at[point] / 10 + "%";
  };
  area.addEventListener("pointermove", read);
  area.addEventListener("pointerdown", read);
  area.addEventListener("pointerleave", () => { cursor.hidden = true; reading.textContent = summary; });
}

// Lanes: the view is a piece [from, to] of the step's seconds.
for (const figure of document.querySelectorAll(".lanes")) {
  const end = Number(figure.dataset.end);
  const spans = JSON.parse(figure.dataset.spans);
  const area = figure.querySelector(".area"), svg = figure.querySelector("svg");
  const places = figure.querySelector(".places"), reading = figure.querySelector(".reading");
  const height = svg.viewBox.baseVal.height;
  let from = 0, to = end, chosen = null;
  const written = (t, step) => {
    const [size, unit] = step >= 0.1 ? [1, "s"] : step >= 1e-4 ? [1e3, "ms"] : [1e6, "µs"];
    const digits = Math.max(0, -Math.floor(Math.log10(step * size) + 1e-9));
    return (t * size).toFixed(digits) + " " + unit;
  };
  const show = (a, b) => {
    const width = Math.min(end, Math.max(end / 20000, b - a));
    from = Math.min(Math.max(0, a), end - width);
    to = from + width;
    svg.setAttribute("viewBox", `${from} 0 ${width} ${height}`);
    const rough = width / 5, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    places.replaceChildren();
    for (let i = Math.ceil(from / step); i * step < from + 0.97 * width; i++) {
      const mark = document.createElement("span");
      mark.style.left = 100 * (i * step - from) / width + "%";
      if (i * step - from < 0.02 * width) mark.style.transform = "none";
      else mark.style.transform = "translateX(-50%)";
      mark.textContent = written(i * step, step);
      places.append(mark);
    }
  };
  const zoom = (factor, at = (from + to) / 2) => show(at - (at - from) * factor, at + (to - at) * factor);
  const move = (share) => show(from + share * (to - from), to + share * (to - from));
  const actions = {
    in: () => zoom(0.5), out: () => zoom(2), all: () => show(0, end),
    left: () => move(-0.25), right: () => move(0.25),
  };
  const time = (x) => {
    const box = area.getBoundingClientRect();
    return from + (to - from) * (x - box.left) / box.width;
  };
  const choose = (bar) => {
    if (chosen) chosen.classList.remove("on");
    chosen = bar;
    if (!bar) { reading.textContent = reading.dataset.whole; return; }
    bar.classList.add("on");
    const [name, lasted, start, ...after] = spans[bar.dataset.n];
    const waited = after.length ? `; waited for: ${after.join(", ")}` : "";
    reading.textContent = `${name}: ${lasted}, from ${start}${waited}`;
  };
  const pointers = new Map();
  area.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.clientX);
    area.setPointerCapture(event.pointerId);
  });
  area.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    const under = document.elementFromPoint(event.clientX, event.clientY);
    if (under && under.matches("rect[data-n]") && area.contains(under)) choose(under);
    if (before === undefined) return;
    if (pointers.size === 1) {
      const shift = time(before) - time(event.clientX);
      show(from + shift, to + shift);
    } else if (pointers.size === 2) {
      const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
      const ratio = Math.abs(before - other) / Math.max(8, Math.abs(event.clientX - other));
      zoom(ratio, time(other));
    }
    pointers.set(event.pointerId, event.clientX);
  });
  for (const name of ["pointerup", "pointercancel"])
    area.addEventListener(name, (event) => {
      pointers.delete(event.pointerId);
      const under = document.elementFromPoint(event.clientX, event.clientY);
      if (under && under.matches("rect[data-n]")) choose(under);
    });
  area.addEventListener("pointerleave", () => { if (!pointers.size) choose(null); });
  area.addEventListener("dblclick", (event) => zoom(0.25, time(event.clientX)));
  area.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, time(event.clientX));
  }, { passive: false });
  area.addEventListener("keydown", (event) => {
    const keys = { "+": "in", "=": "in", "-": "out", "0": "all", ArrowLeft: "left", ArrowRight: "right" };
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[keys[event.key]]();
  });
  for (const button of figure.querySelectorAll("button"))
    button.addEventListener("click", actions[button.dataset.do]);
  show(0, end);
}

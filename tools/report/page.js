"use strict";
// Draws the charts in the colours of the page, again when the reader turns to dark or light, and sorts tables.
const charts = JSON.parse(document.getElementById("charts").textContent);

function rows(columns) {
  const names = Object.keys(columns);
  return columns[names[0]].map((_, place) => Object.fromEntries(names.map((name) => [name, columns[name][place]])));
}

function draw() {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const [ink, soft, line] = ["--ink", "--soft", "--line"].map(colour);
  const config = {
    background: "transparent",
    view: { stroke: null },
    axis: { labelColor: soft, titleColor: soft, gridColor: line, domainColor: line, tickColor: line, titleFontWeight: 400, labelFontSize: 11 },
    axisX: { grid: false, labelFlush: true },
    legend: { labelColor: ink, labelFontSize: 11 },
    rule: { color: soft },
    text: { color: soft },
    font: "system-ui, sans-serif",
  };
  for (const place of document.querySelectorAll(".chart")) {
    const { spec, data } = charts[place.dataset.chart];
    const whole = { width: "container", autosize: { type: "fit-x", contains: "padding" }, ...spec, config, data: { values: rows(data) } };
    // ast: expressions are interpreted, since the page's policy lets no text become code.
    const theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    window.vegaEmbed(place, whole, { actions: false, ast: true, renderer: "canvas", tooltip: { theme } })
      .catch((problem) => { place.textContent = `This chart cannot be drawn: ${problem.message}`; console.error(problem); });
  }
}

function sortBy(heading) {
  const body = heading.closest("table").tBodies[0];
  const column = heading.cellIndex;
  const falling = heading.getAttribute("aria-sort") === "ascending";
  const key = (row) => (row.cells[column].dataset.key === undefined ? null : Number(row.cells[column].dataset.key));
  const text = (row) => row.cells[column].textContent;
  const order = (a, b) => {
    if (key(a) !== null && key(b) !== null) return key(a) - key(b);
    if (key(a) !== key(b)) return key(a) === null ? 1 : -1;
    return text(a).localeCompare(text(b), "en", { numeric: true });
  };
  const sorted = [...body.rows].sort(order);
  body.append(...(falling ? sorted.reverse() : sorted));
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
}

for (const heading of document.querySelectorAll("table.sorts thead th")) heading.firstElementChild.addEventListener("click", () => sortBy(heading));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();

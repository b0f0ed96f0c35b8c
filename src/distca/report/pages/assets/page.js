"use strict";
// Draws a page from its record (see page.py), and draws it again when the theme or the records change.

const dark = matchMedia("(prefers-color-scheme: dark)");
const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
// From the background to its opposite in one hue, so that colors are ordered by lightness alone.
const SCALES = {
  light: [[0, "#eaf1f7"], [0.5, "#4c9fd0"], [1, "#00304f"]],
  dark: [[0, "#1c2731"], [0.5, "#1f7fb8"], [1, "#cdeaff"]],
};
const NARROW = 760; // pixels
const POLL_MS = 2000;
const RELEASE_MS = 20000; // how long a poll may take before the server counts as gone

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** What all figures have in common; it depends on the theme. */
function template() {
  const axis = {
    gridcolor: color("grid"), linecolor: color("line"), zerolinecolor: color("line"),
    tickcolor: color("line"), automargin: true,
  };
  return {
    layout: {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", xaxis: axis, yaxis: axis,
      font: { color: color("ink"), family: "system-ui, sans-serif", size: 12 },
      hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink") } },
      shapedefaults: { line: { color: color("quiet"), width: 1, dash: "dash" } },
      margin: { l: 60, r: 16, t: 30, b: 44 },
      legend: { bgcolor: "rgba(0,0,0,0)" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("line"), activecolor: color("accent") },
    },
    data: { heatmap: [{ colorscale: SCALES[dark.matches ? "dark" : "light"], colorbar: { outlinewidth: 0, thickness: 12 } }] },
  };
}

/** Draws a figure of plotly, without losing what the reader has zoomed into. */
function plot(place, figure) {
  const layout = { ...figure.layout, template: template(), uirevision: "kept" };
  if (innerWidth < NARROW) layout.showlegend = false; // it would cover titles; hovering names lines
  const data = figure.data.map((trace) => ({ ...trace })); // plotly writes into what it is given
  return Plotly.react(place, data, structuredClone(layout), CONFIG);
}

function tableOf({ columns, rows }) {
  const isText = columns.map((_, column) => rows.some((row) => /^[^-\d]/.test(row[column])));
  const cells = (kind, values) => values.map((value, column) =>
    element(kind, { textContent: value, className: isText[column] ? "text" : "" }));
  return element("div", { className: "scroll", tabIndex: 0 },
    element("table", {},
      element("thead", {}, element("tr", {}, ...cells("th", columns))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells("td", row))))));
}

const drawn = new Map(); // the elements of each section, by its name

function newSection(section) {
  const parts = {
    title: element("h2"), note: element("p", { className: "note" }),
    plot: element("div", { className: "plot" }), view: element("div"),
    table: element("details", {}, element("summary", { textContent: "as a table" }), element("div")),
  };
  const className = section.half ? "half" : "";
  const whole = element("section", { id: section.name, className }, ...Object.values(parts));
  parts.whole = whole;
  drawn.set(section.name, parts);
  return parts;
}

function drawSection(section) {
  const parts = drawn.get(section.name) ?? newSection(section);
  document.querySelector("main").append(parts.whole);
  parts.title.textContent = section.title;
  parts.note.textContent = section.note;
  parts.note.hidden = !section.note;
  parts.plot.hidden = !section.figure;
  if (section.figure) {
    parts.plot.setAttribute("role", "img");
    parts.plot.setAttribute("aria-label", `${section.title}. ${section.note}`);
    plot(parts.plot, section.figure);
  }
  if (section.draws) VIEWS[section.draws](parts.view, section.view);
  parts.table.hidden = !section.table;
  if (section.table) {
    const old = parts.table.querySelector(".scroll");
    const [top, left] = old ? [old.scrollTop, old.scrollLeft] : [0, 0];
    parts.table.lastChild.replaceChildren(tableOf(section.table));
    Object.assign(parts.table.querySelector(".scroll"), { scrollTop: top, scrollLeft: left });
    const alone = !section.figure && !section.draws;
    parts.table.firstChild.hidden = alone;
    if (alone) parts.table.open = true;
  }
}

function drawPage(page) {
  const main = document.querySelector("main");
  document.title = page.title;
  const facts = Object.entries(page.facts).map(([name, value]) =>
    element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value })));
  const head = element("header", {},
    element("h1", { textContent: page.title }),
    ...page.words.map((words, index) => element("p", { textContent: words, className: index ? "quiet" : "" })),
    element("dl", { className: "facts" }, ...facts));
  main.querySelector("header")?.remove();
  main.prepend(head);
  const names = new Set(page.sections.map((section) => section.name));
  for (const [name, parts] of drawn) parts.whole.hidden = !names.has(name);
  page.sections.forEach(drawSection);
}

/** Asks the server for newer records, for as long as the page is open. */
async function follow(state) {
  const status = element("p", { className: "quiet", role: "status" });
  document.querySelector("main").before(status);
  status.style.cssText = "margin:12px 24px -12px;text-align:right";
  for (let tag = ""; ; await new Promise((done) => setTimeout(done, POLL_MS))) {
    try {
      const headers = tag ? { "If-None-Match": tag } : {};
      const answer = await fetch("page.json", { headers, signal: AbortSignal.timeout(RELEASE_MS) });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag") ?? "";
        state.page = await answer.json();
        drawPage(state.page);
      }
      status.textContent = answer.ok || answer.status === 304
        ? `live, ${new Date().toLocaleTimeString()}` : `not updated: ${await answer.text()}`;
    } catch {
      status.textContent = "not live any more: the server has ended; this is what was last known";
    }
  }
}

const state = { page: JSON.parse(document.getElementById("page").textContent) };
drawPage(state.page);
dark.addEventListener("change", () => drawPage(state.page));
if ("live" in document.body.dataset) follow(state);

"use strict";
// The timeline of a simulated step: the streams of ranks, colored by what they do.

const TICKS = 900; // cells along the axis of time

class Timeline {
  constructor(place, view) {
    this.view = view;
    this.zoom = null;
    this.end = Math.max(...view.to.map(Number), 1e-9);
    this.rows = view.rows.map(() => []);
    view.row.forEach((row, index) => this.rows[row].push({ index, from: view.from[index], to: view.to[index] }));
    this.figure = element("div", { className: "plot" });
    this.tip = element("div", { className: "tip", hidden: true });
    const colors = this.colors();
    this.key = element("p", { className: "note" }, ...view.kinds.flatMap((kind, index) => [
      element("span", { className: "swatch", style: `background:${colors[index]}` }), `${kind} `]));
    place.replaceChildren(this.key, this.figure, this.tip);
  }

  colors() {
    return this.view.kinds.map((_, index) => [...PALETTE, "#999999", "#8C6D31", "#7B61B5"][index % 9]);
  }

  draw() {
    const { rows, view } = this, range = this.zoom ?? [0, this.end];
    const lines = rows.flatMap((pieces) => {
      const cells = rowOfCells(pieces, TICKS, range, ({ index }) => view.kind[index]);
      return [cells, cells, cells, null];
    });
    const step = Math.max(Math.ceil(rows.length / 40), 1);
    const shown = view.rows.map((_, row) => row).filter((row) => row % step === 0);
    plot(this.figure, {
      data: [cellMap(lines, TICKS, 4, range, this.colors())],
      layout: {
        height: Math.min(Math.max(rows.length * 16, 200), 720) + 60, margin: { l: 60, r: 12, t: 6, b: 44 },
        xaxis: { range, ticksuffix: "s", exponentformat: "SI", zeroline: false },
        yaxis: { range: [rows.length - 0.5, -0.5], tickvals: shown, ticktext: shown.map((row) => view.rows[row]),
          showgrid: false, zeroline: false, fixedrange: true, tickfont: { size: 10 } },
      },
    });
    if (!this.listens) this.listen();
  }

  listen() {
    this.listens = true;
    this.figure.on("plotly_hover", (event) => {
      const [{ x, y }] = event.points, row = Math.round(y);
      const piece = pieceAt(this.rows[row] ?? [], x);
      if (!piece) return;
      const { names, name, rows } = this.view;
      const words = `${names[name[piece.index]]}: ${time(piece.to - piece.from)}, from ${time(piece.from)}`;
      tellAt(this.tip, event.event, `${words}\n${rows[row]}`);
    });
    this.figure.on("plotly_unhover", () => { this.tip.hidden = true; });
    this.figure.on("plotly_relayout", (event) => {
      const range = newRange(event, "xaxis");
      if (range === undefined) return;
      this.zoom = range;
      this.draw();
    });
  }
}

VIEWS.timeline = (place, view) => {
  place.timeline ??= new Timeline(place, view);
  place.timeline.draw();
};

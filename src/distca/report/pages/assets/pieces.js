"use strict";
// The pieces of a plan: which rank holds each document, and which computes it.

const CELLS = { few: 480, many: 320 }; // along one axis, by the number of ranks
const MANY = 128; // ranks
const GAPPED = 48; // ranks up to which there is space between rows
const LISTED = 300; // documents in the list: those in most pieces
const SHOWN = 200; // pieces in the table of a document

const count = (value) => value.toLocaleString("en-US");

function size(bytes) {
  if (!bytes) return "0 B";
  const power = Math.min(Math.floor(Math.log10(Math.max(bytes, 1)) / 3), 5);
  return `${(bytes / 1000 ** power).toPrecision(3)} ${["B", "kB", "MB", "GB", "TB", "PB"][power]}`;
}

/** Returns the pieces of each rank, each with its place [from, to] on the rank's axis. */
function onRanks(numRanks, table, rankOf, widthOf, startOf) {
  const ranks = Array.from({ length: numRanks }, () => []);
  const ends = Array.from({ length: numRanks }, (_, rank) => startOf(rank));
  for (let index = 0; index < table.document.length; index++) {
    const rank = rankOf(index), from = ends[rank];
    ends[rank] += widthOf(index);
    ranks[rank].push({ index, document: table.document[index], rank, from, to: ends[rank] });
  }
  return { ranks, longest: Math.max(...ends) };
}

class Pieces {
  constructor(place, view) {
    this.place = place;
    this.view = view;
    this.chosen = null;
    this.way = 0;
    this.zoom = [null, null];
    this.held = onRanks(view.num_ranks, view.shards, (i) => view.shards.worker[i],
      (i) => view.shards.stop[i] - view.shards.start[i], () => 0);
    this.computed = view.tasks.map((tasks) => onRanks(view.num_ranks, tasks, (i) => tasks.server[i],
      (i) => tasks.seconds[i], (rank) => view.busy_s[rank]));
    this.build();
  }

  name(rank) {
    const { num_workers } = this.view;
    return rank < num_workers ? `rank ${rank}` : `rank ${rank} (server ${rank - num_workers})`;
  }

  row(rank) { // dedicated servers are drawn apart
    return rank + (rank >= this.view.num_workers ? 1 : 0);
  }

  build() {
    this.figure = element("div", { className: "plot" });
    this.tip = element("div", { className: "tip", hidden: true });
    this.list = element("select", { id: "documents", size: 12 });
    this.number = element("input", { id: "document", type: "number", min: 0, max: this.view.lengths.length - 1 });
    this.ways = element("select", { id: "way" }, element("option", { textContent: "forward" }),
      element("option", { textContent: "backward" }));
    this.clear = element("button", { textContent: "show all documents", type: "button" });
    this.about = element("div", { className: "about" });
    this.about.setAttribute("aria-live", "polite");
    const label = (to, words) => element("label", { htmlFor: to, textContent: words });
    const side = element("div", {}, label("way", "direction"), this.ways,
      label("documents", "documents in most pieces (choose with the arrow keys)"), this.list,
      label("document", "or any document by its number"), this.number, this.clear);
    this.place.replaceChildren(element("div", { className: "pieces" }, this.figure, side), this.about, this.tip);
    this.ways.onchange = () => { this.way = this.ways.selectedIndex; this.zoom[1] = null; this.fillList(); this.draw(); this.tell(); };
    this.list.onchange = () => this.choose(Number(this.list.value));
    this.number.onchange = () => this.choose(this.number.value === "" ? null : Number(this.number.value));
    this.clear.onclick = () => this.choose(null);
    this.place.onkeydown = (event) => { if (event.key === "Escape") this.choose(null); };
    this.fillList();
  }

  fillList() {
    const { lengths } = this.view, tasks = this.view.tasks[this.way];
    const pieces = new Array(lengths.length).fill(0);
    tasks.document.forEach((document) => pieces[document]++);
    const order = lengths.map((_, document) => document)
      .sort((a, b) => pieces[b] - pieces[a] || lengths[b] - lengths[a]).slice(0, LISTED);
    this.list.replaceChildren(...order.map((document) => element("option", {
      value: document, selected: document === this.chosen,
      textContent: `${document}: ${count(lengths[document])} tokens, ${pieces[document]} piece${pieces[document] === 1 ? "" : "s"}`,
    })));
  }

  choose(document) {
    const known = Number.isInteger(document) && document >= 0 && document < this.view.lengths.length;
    this.chosen = known ? document : null;
    this.number.value = this.chosen ?? "";
    this.list.value = String(this.chosen);
    this.draw();
    this.tell();
  }

  draw() {
    const { num_ranks, num_workers, bound_s } = this.view;
    const narrow = innerWidth < NARROW, sub = num_ranks <= GAPPED ? 4 : 1;
    const rows = this.row(num_ranks - 1) + 1, cells = CELLS[num_ranks > MANY ? "many" : "few"];
    const sides = [this.held, this.computed[this.way]];
    const colorOf = ({ document }) => (
      this.chosen !== null && document !== this.chosen ? PALETTE.length : document % PALETTE.length);
    const data = sides.map(({ ranks, longest }, side) => {
      const range = this.zoom[side] ?? [0, longest * 1.02 || 1];
      const lines = new Array(rows * sub).fill(null);
      ranks.forEach((pieces, rank) => {
        const first = this.row(rank) * sub;
        lines.fill(rowOfCells(pieces, cells, range, colorOf), first, first + Math.max(sub - 1, 1));
      });
      const axes = { xaxis: side ? "x2" : "x", yaxis: side ? "y2" : "y" };
      return { ...cellMap(lines, cells, sub, range, [...PALETTE, color("faded")]), ...axes };
    });
    const shown = Array.from({ length: num_ranks }, (_, rank) => rank)
      .filter((rank) => rank % 2 ** Math.max(Math.ceil(Math.log2(num_ranks / 24)), 0) === 0 || rank === num_workers);
    const axis = {
      range: [rows - 0.5, -0.5], tickvals: shown.map((rank) => this.row(rank)), showgrid: false, zeroline: false,
      ticktext: shown.map((rank) => (rank < num_workers ? `${rank}` : `server ${rank - num_workers}`)),
    };
    const height = Math.min(Math.max(rows * 16, 240), 620);
    const layout = {
      height: (narrow ? 2 : 1) * height + 110, margin: { l: 64, r: 12, t: 30, b: 48 }, dragmode: "zoom",
      xaxis: { title: { text: "tokens that a rank holds" }, anchor: "y", domain: narrow ? [0, 1] : [0, 0.47],
        range: this.zoom[0] ?? [0, sides[0].longest * 1.02 || 1], zeroline: false },
      xaxis2: { title: { text: "attention that a rank computes" }, anchor: "y2", domain: narrow ? [0, 1] : [0.53, 1],
        range: this.zoom[1] ?? [0, sides[1].longest * 1.02 || 1], zeroline: false, ticksuffix: "s", exponentformat: "SI" },
      yaxis: { ...axis, title: { text: "rank" }, domain: narrow ? [0.56, 1] : [0, 1] },
      yaxis2: { ...axis, anchor: "x2", matches: "y", domain: narrow ? [0, 0.44] : [0, 1], showticklabels: narrow },
      shapes: [{ type: "line", xref: "x2", yref: "y2 domain", x0: bound_s[this.way], x1: bound_s[this.way], y0: 0, y1: 1 }],
    };
    plot(this.figure, { data, layout });
    if (!this.listens) this.listen();
  }

  listen() {
    this.listens = true;
    const found = ({ points: [{ curveNumber, x, y }] }) => {
      const rank = y > this.view.num_workers - 0.5 ? Math.round(y) - 1 : Math.round(y);
      const side = curveNumber ? this.computed[this.way] : this.held;
      return [curveNumber, pieceAt(side.ranks[rank] ?? [], x)];
    };
    this.figure.on("plotly_hover", (event) => {
      const [side, piece] = found(event);
      if (piece) tellAt(this.tip, event.event, side ? this.taskWords(piece) : this.shardWords(piece));
    });
    this.figure.on("plotly_unhover", () => { this.tip.hidden = true; });
    this.figure.on("plotly_click", (event) => {
      const [, piece] = found(event);
      if (piece) this.choose(piece.document === this.chosen ? null : piece.document);
    });
    this.figure.on("plotly_relayout", (event) => {
      const ranges = ["xaxis", "xaxis2"].map((axis) => newRange(event, axis));
      if (ranges.every((range) => range === undefined)) return;
      this.zoom = ranges.map((range, side) => (range === undefined ? this.zoom[side] : range));
      this.draw();
    });
  }

  shardWords({ index, document, rank }) {
    const { start, stop } = this.view.shards;
    return `document ${document} of ${count(this.view.lengths[document])} tokens\n`
      + `[${count(start[index])}, ${count(stop[index])}) held by ${this.name(rank)}`;
  }

  taskWords({ index, document, rank }) {
    const tasks = this.view.tasks[this.way], home = tasks.home[index];
    const where = home === rank ? "at home" : `for ${this.name(home)}`;
    return `document ${document} of ${count(this.view.lengths[document])} tokens\n`
      + `queries [${count(tasks.q_start[index])}, ${count(tasks.q_stop[index])}), keys`
      + ` [${count(tasks.kv_start[index])}, ${count(tasks.kv_stop[index])})\n`
      + `${time(tasks.seconds[index])} on ${this.name(rank)}, ${where}\n`
      + `moved with its queries: ${size(tasks.q_bytes[index])}; keys of the document that this rank`
      + ` receives: ${size(tasks.kv_bytes[index])}`;
  }

  /** Lists the pieces of the chosen document. */
  tell() {
    if (this.chosen === null) return this.about.replaceChildren();
    const tasks = this.view.tasks[this.way], own = [];
    tasks.document.forEach((document, index) => { if (document === this.chosen) own.push(index); });
    const rows = own.slice(0, SHOWN).map((i) => [
      `[${count(tasks.q_start[i])}, ${count(tasks.q_stop[i])})`, `[${count(tasks.kv_start[i])}, ${count(tasks.kv_stop[i])})`,
      this.name(tasks.home[i]), this.name(tasks.server[i]), time(tasks.seconds[i]), size(tasks.q_bytes[i]), size(tasks.kv_bytes[i]),
    ]);
    const columns = ["queries", "keys", "held by", "computed by", "time", "moved with queries", "keys received"];
    const words = `Document ${this.chosen}: ${count(this.view.lengths[this.chosen])} tokens, ${this.view.masks[this.chosen]}, in ${own.length} piece${own.length === 1 ? "" : "s"}`;
    this.about.replaceChildren(element("h2", { textContent: words }), tableOf({ columns, rows }));
  }
}

VIEWS.pieces = (place, view) => {
  place.pieces ??= new Pieces(place, view);
  place.pieces.draw();
};

"use strict";
// Pieces on rows, drawn as maps of cells instead of one by one, and again for each zoom, so that
// thousands of pieces cost no more than a few.

const VIEWS = {};
const PALETTE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"];

function time(seconds) {
  if (seconds >= 1) return `${seconds.toPrecision(3)} s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toPrecision(3)} ms` : `${(seconds * 1e6).toPrecision(3)} us`;
}

/** Returns the piece at a place of a row, if there is one. */
function pieceAt(pieces, place) {
  let low = 0, high = pieces.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (pieces[middle].to <= place) low = middle + 1; else high = middle;
  }
  return low < pieces.length && pieces[low].from <= place ? pieces[low] : undefined;
}

/** Returns the colors of so many cells of a row between two places, where colorOf gives that of a piece. */
function rowOfCells(pieces, cells, [from, to], colorOf) {
  const row = new Array(cells).fill(null), width = (to - from) / cells;
  let last;
  for (let cell = 0; cell < cells; cell++) {
    const piece = pieceAt(pieces, from + (cell + 0.5) * width);
    if (piece) {
      const first = piece !== last && piece.to - piece.from > 4 * width; // leaves a line between two
      row[cell] = first && cell ? null : colorOf(piece);
    }
    last = piece;
  }
  return row;
}

/** Returns a map of rows, each of which is drawn as some lines of cells; lines that are null stay empty. */
function cellMap(lines, cells, perRow, [from, to], colors) {
  const dx = (to - from) / cells, empty = new Array(cells).fill(null);
  return {
    type: "heatmap", z: lines.map((line) => line ?? empty), x0: from + dx / 2, dx, y0: -0.5 + 0.5 / perRow,
    dy: 1 / perRow, zmin: -0.5, zmax: colors.length - 0.5, showscale: false, hoverongaps: false, hoverinfo: "none",
    colorscale: colors.flatMap((one, index) => [[index / colors.length, one], [(index + 1) / colors.length, one]]),
  };
}

/** Shows words beside the mouse. */
function tellAt(tip, { clientX, clientY }, words) {
  tip.textContent = words;
  tip.hidden = false;
  tip.style.left = `${Math.min(clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

/** Returns the range to which the reader has set an axis: null for all, undefined if it is as before. */
function newRange(event, axis) {
  if (`${axis}.range[0]` in event) return [event[`${axis}.range[0]`], event[`${axis}.range[1]`]];
  return event[`${axis}.autorange`] ? null : undefined;
}

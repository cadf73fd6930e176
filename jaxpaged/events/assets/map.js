// The pool as a grid of cells on a canvas; the same for the host tier.

const cssCache = new Map(); // emptied when the theme changes

function css(name) {
  if (!cssCache.has(name)) cssCache.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return cssCache.get(name);
}

function readColours() {
  const colours = {};
  for (const name of ["free", "free-edge", "cached", "cached-fill", "owned", "owned-fill", "host", "host-fill", "wasted", "ink", "muted", "line", "surface", "accent", "used"])
    colours[name] = css(`--${name}`);
  colours.shared = [2, 3, 4, 5].map((n) => css(`--shared-${n}`));
  colours.sharedFill = [2, 3, 4, 5].map((n) => css(`--shared-${n}-fill`));
  return colours;
}

function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

const EDGE = 2; // room around the cells for rings

class Grid {
  constructor(canvas, first, count) {
    this.canvas = canvas;
    this.first = first; // id of the first cell
    this.count = count;
  }

  // The largest cell with which all pages fit into the width and at most `tallest` pixels.
  layout(tallest, cell) {
    const width = this.canvas.parentElement.clientWidth - 2 * EDGE;
    if (!cell) {
      for (cell = 42; cell > 3; cell--) if (Math.ceil(this.count / Math.max(1, Math.floor(width / cell))) * cell <= tallest) break;
    }
    this.cell = cell;
    this.gap = cell >= 20 ? 3 : cell >= 8 ? 2 : cell >= 5 ? 1 : 0;
    this.columns = Math.max(1, Math.min(this.count, Math.floor(width / cell)));
    this.height = Math.ceil(this.count / this.columns) * cell;
    this.width = width + 2 * EDGE;
    this.height += 2 * EDGE;
    this.context = fitCanvas(this.canvas, this.width, this.height);
  }

  box(id) {
    const at = id - this.first;
    return [EDGE + (at % this.columns) * this.cell, EDGE + Math.floor(at / this.columns) * this.cell, this.cell - this.gap];
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - EDGE) / this.cell);
    const row = Math.floor((event.clientY - box.top - EDGE) / this.cell);
    if (column < 0 || row < 0 || column >= this.columns) return -1;
    const at = row * this.columns + column;
    return at < this.count ? at + this.first : -1;
  }
}

// What a device page is, as an index into the palette below.
function stateOf(pool, page) {
  const ref = pool.ref[page];
  if (ref > 1) return 2 + Math.min(ref, 5);
  if (ref === 1) return 2;
  return pool.cached[page] ? 1 : 0;
}

const STATE_NAMES = ["free", "cached", "owned once", "", "shared by 2", "shared by 3", "shared by 4", "shared by 5 or more"];

function palette(colours) {
  const { shared, sharedFill } = colours;
  return {
    pale: [colours.free, colours.cached, colours.owned, "", shared[0], shared[1], shared[2], shared[3]],
    full: [colours["free-edge"], colours["cached-fill"], colours["owned-fill"], "", sharedFill[0], sharedFill[1], sharedFill[2], sharedFill[3]],
  };
}

function roundBox(context, x, y, size, radius) {
  context.beginPath();
  context.roundRect(x, y, size, size, radius);
}

// Draws one grid: `states[i]`, `fills[i]` in [0, 1] and whether cell i is dimmed.
function drawCells(grid, colours, stateAt, fillAt, dimmed, labelAt) {
  const { context, count, first, cell, gap } = grid, { pale, full } = palette(colours);
  context.clearRect(0, 0, grid.width, grid.height);
  const size = cell - gap, radius = cell >= 12 ? Math.min(5, size / 4) : 0, detailed = cell >= 8;
  const buckets = pale.map(() => []);
  for (let at = 0; at < count; at++) buckets[stateAt(first + at)].push(first + at);
  for (let state = 0; state < buckets.length; state++) {
    for (const dim of [false, true]) {
      context.globalAlpha = dim ? 0.3 : 1;
      for (const layer of [0, 1]) {
        if (layer && (!detailed || state === 0)) continue;
        context.fillStyle = layer || (!detailed && state) ? full[state] : pale[state];
        for (const id of buckets[state]) {
          if (dimmed(id) !== dim) continue;
          const [x, y] = grid.box(id);
          if (!layer) {
            if (radius) { roundBox(context, x, y, size, radius); context.fill(); } else context.fillRect(x, y, size, size);
            continue;
          }
          const part = fillAt(id), high = Math.round(size * part);
          if (!high) continue;
          if (radius) {
            context.save();
            roundBox(context, x, y, size, radius);
            context.clip();
            context.fillRect(x, y + size - high, size, high);
            context.restore();
          } else context.fillRect(x, y + size - high, size, high);
        }
      }
    }
  }
  context.globalAlpha = 1;
  if (cell >= 18) {
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = `600 ${Math.round(size * 0.42)}px ${css("--figures")}`;
    for (let at = 0; at < count; at++) {
      const id = first + at, label = labelAt(id);
      if (!label) continue;
      const [x, y] = grid.box(id);
      context.globalAlpha = dimmed(id) ? 0.45 : 1;
      context.fillStyle = label[1];
      context.fillText(label[0], x + size / 2, y + size / 2 + 0.5);
    }
    context.globalAlpha = 1;
  }
}

function ring(grid, id, colour, width, inset = 0) {
  const [x, y, size] = grid.box(id), { context } = grid;
  context.strokeStyle = colour;
  context.lineWidth = width;
  const grow = width / 2 - inset;
  context.beginPath();
  context.roundRect(x - grow, y - grow, size + 2 * grow, size + 2 * grow, grid.cell >= 12 ? 5 : 1);
  context.stroke();
}

// An arrow from page to page: a copy of this step.
function arrow(grid, from, to, colour) {
  const [x1, y1, size] = grid.box(from), [x2, y2] = grid.box(to), { context } = grid, half = size / 2;
  const ax = x1 + half, ay = y1 + half, bx = x2 + half, by = y2 + half;
  const length = Math.hypot(bx - ax, by - ay) || 1, bend = Math.min(60, length * 0.25);
  const mx = (ax + bx) / 2 + ((by - ay) / length) * bend, my = (ay + by) / 2 - ((bx - ax) / length) * bend;
  const angle = Math.atan2(by - my, bx - mx), head = Math.max(5, Math.min(9, size / 2.5));
  const tx = bx - Math.cos(angle) * half * 0.6, ty = by - Math.sin(angle) * half * 0.6;
  for (const [stroke, width] of [[css("--surface"), 5], [colour, 2]]) {
    context.strokeStyle = context.fillStyle = stroke;
    context.lineWidth = width;
    context.beginPath();
    context.moveTo(ax, ay);
    context.quadraticCurveTo(mx, my, tx, ty);
    context.stroke();
  }
  context.beginPath();
  context.moveTo(tx + Math.cos(angle) * 2, ty + Math.sin(angle) * 2);
  context.lineTo(tx - head * Math.cos(angle - 0.5), ty - head * Math.sin(angle - 0.5));
  context.lineTo(tx - head * Math.cos(angle + 0.5), ty - head * Math.sin(angle + 0.5));
  context.fill();
  context.beginPath();
  context.arc(ax, ay, 3, 0, 7);
  context.fill();
}

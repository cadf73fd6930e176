// Ties the parts together: one view of one run at one frame.

class View {
  constructor(log) {
    Object.assign(this, { log, frame: 0, pool: null, picked: -1, pinned: -1, hovered: -1, playing: false, cursor: 1 });
    this.map = new Grid($("map"), 1, Math.max(1, log.numPages - 1));
    this.host = new Grid($("host-map"), 0, log.numHost);
    this.curves = new Curves($("curves"), log, (frame) => this.go(frame));
    $("host-part").hidden = !log.numHost;
    $("slider").max = log.numFrames - 1;
    $("of").textContent = log.numSteps ? `of ${log.stepName(0)}–${log.stepName(log.numSteps - 1)}` : "";
    const header = log.run.header, facts = [
      `${(log.numPages - 1).toLocaleString("en")} pages of ${plural(log.pageSize, "token")}`,
      `${plural(log.requests.length, "request")}, ${plural(log.seqs.length, "sequence")}`, plural(log.numSteps, "step"),
    ];
    if (log.numHost) facts.push(plural(log.numHost, "host page"));
    if (header.preemption_mode) facts.push(`preemption ${header.preemption_mode}`);
    if (header.enable_prefix_caching === false) facts.push("no prefix caching");
    if (header.sliding_window) facts.push(`window ${header.sliding_window}`);
    $("subtitle").textContent = `${data.name} · ${facts.join(" · ")}`;
    $("problem").hidden = !log.run.problem;
    $("problem").textContent = log.run.problem;
  }

  layout() {
    this.colours = readColours();
    const wide = window.innerWidth > 900;
    this.map.layout(this.log.numHost ? (wide ? 340 : 300) : wide ? 430 : 340);
    if (this.log.numHost) this.host.layout(120, this.map.count > this.log.numHost * 4 || this.log.numHost > 400 ? 0 : this.map.cell);
    this.curves.layout();
    this.draw();
  }

  go(frame) {
    frame = Math.max(0, Math.min(this.log.numFrames - 1, frame));
    this.pool = this.log.poolAt(frame, this.pool);
    this.frame = frame;
    this.draw();
  }

  pick(seq) {
    this.picked = seq;
    this.pinned = -1;
    this.draw();
  }

  hover(page) {
    if (page === this.hovered) return;
    this.hovered = page;
    this.drawMap();
    this.inspect();
  }

  inspect() {
    if (this.hovered > 0) inspectPage(this, this.hovered);
    else if (this.pinned > 0) inspectPage(this, this.pinned);
    else if (this.picked >= 0) inspectSequence(this, this.picked);
    else inspectNothing();
  }

  drawMap() {
    const { log, pool, map, host, colours, frame } = this, size = log.pageSize;
    const table = this.picked >= 0 ? pool.tables.get(this.picked) || [] : null;
    const mine = table && new Set(table.filter((value) => value > 0)), mineAway = table && new Set(table.filter((value) => value < 0).map((value) => -1 - value));
    const bright = css("--on-fill");
    const fill = (page) => (!log.hasWrites ? 1 : pool.ref[page] || pool.cached[page] ? pool.fill[page] / size : 0);
    drawCells(map, colours, (page) => stateOf(pool, page), fill, (page) => mine !== null && !mine.has(page),
      (page) => (pool.ref[page] > 1 ? [String(pool.ref[page]), bright] : pool.pins[page] ? ["•", css("--ink")] : null));
    const from = log.frameStart(frame), to = log.frameEnd[frame], touched = new Set(), copies = [];
    for (let i = from; i < to; i++) {
      const kind = log.kind[i];
      if ((kind === K.alloc || kind === K.copy || kind === K.restore || kind === K.swap_in) && pool.ref[log.page[i]]) touched.add(log.page[i]);
      if (kind === K.copy) copies.push([log.other[i], log.page[i]]);
    }
    if (map.cell >= 6) for (const page of touched) ring(map, page, colours.ink, map.cell >= 14 ? 1.8 : 1, 0.5);
    if (mine && map.cell >= 6) for (const page of mine) ring(map, page, colours.accent, 2);
    for (const [src, page] of copies.slice(0, 60)) arrow(map, src, page, colours.ink);
    for (const page of [this.pinned, this.hovered]) if (page > 0) ring(map, page, colours.accent, 3);
    if (log.numHost) {
      const states = { pale: [colours.free, colours.host, colours.host], full: [colours["free-edge"], colours["host-fill"], colours["host-fill"]] };
      drawHost(host, pool, log, states, mineAway);
    }
  }

  draw() {
    if (!this.pool) return;
    const { log, pool, frame } = this, counts = pool.counts();
    for (const name of ["owned", "shared", "cached", "free", "host"]) $(`count-${name}`).textContent = String(counts[name]);
    $("count-wasted").textContent = log.hasWrites ? String(counts.wasted) : "–";
    $("count-saved").textContent = counts.entries ? `${(100 * (1 - counts.used / counts.entries)).toFixed(1)} %` : "0.0 %";
    $("count-running").textContent = frame < log.numSteps ? String(log.running[frame]) : "–";
    $("count-waiting").textContent = frame < log.numSteps ? String(log.waiting[frame]) : "–";
    const name = log.stepName(frame);
    $("step").textContent = name;
    $("slider").value = String(frame);
    $("slider").setAttribute("aria-valuetext", `step ${name}: ${counts.used} used, ${counts.shared} shared, ${counts.cached} cached, ${counts.free} free`);
    $("slider").style.setProperty("--part", `${log.numFrames > 1 ? (100 * frame) / (log.numFrames - 1) : 0}%`);
    $("map").setAttribute("aria-label", `Map of ${log.numPages - 1} device pages at step ${name}: ${counts.owned} owned once, ${counts.shared} shared, ${counts.cached} cached, ${counts.free} free`);
    document.body.dataset.frame = String(frame);
    this.drawMap();
    this.curves.draw(frame);
    showTables(this);
    showEvents(this);
    this.inspect();
  }

  play(on) {
    this.playing = on;
    $("play").setAttribute("aria-pressed", String(on));
    $("play").setAttribute("aria-label", on ? "Pause" : "Play");
    if (!on) return;
    if (this.frame === this.log.numFrames - 1) this.go(0);
    let before = performance.now(), due = 0;
    const tick = (now) => {
      if (!this.playing || view !== this) return;
      const rate = Number($("speed").value) || this.log.numFrames / 20;
      due += (Math.min(now - before, 250) / 1000) * rate;
      before = now;
      if (due >= 1) {
        this.go(this.frame + Math.floor(due));
        due %= 1;
      }
      if (this.frame === this.log.numFrames - 1) this.play(false);
      else requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }
}

function drawHost(grid, pool, log, states, mine) {
  const { context } = grid, size = grid.cell - grid.gap;
  context.clearRect(0, 0, grid.width, grid.height);
  for (let page = 0; page < log.numHost; page++) {
    const state = pool.hostRef[page] ? 2 : pool.hostKept[page] ? 1 : 0, [x, y] = grid.box(page);
    context.globalAlpha = mine && !mine.has(page) ? 0.4 : 1;
    context.fillStyle = states.pale[state];
    roundBox(context, x, y, size, grid.cell >= 12 ? Math.min(4, size / 4) : 0);
    context.fill();
    if (!state) continue;
    const high = Math.round(size * (log.hasWrites ? pool.hostFill[page] / log.pageSize : 1));
    context.fillStyle = states.full[state];
    context.globalAlpha *= state === 1 ? 0.45 : 1;
    context.save();
    roundBox(context, x, y, size, grid.cell >= 12 ? Math.min(4, size / 4) : 0);
    context.clip();
    context.fillRect(x, y + size - high, size, high);
    context.restore();
  }
  context.globalAlpha = 1;
}

const data = JSON.parse($("log").textContent);
let view = null;

async function openRun(index) {
  if (view) view.play(false);
  view = new View(await Log.load(data.runs[index]));
  $("rows").scrollTop = 0;
  view.frame = Math.max(0, Math.min(view.log.numFrames - 1, Number((location.hash.match(/^#step=(\d+)$/) || [])[1] || 0)));
  view.pool = view.log.poolAt(view.frame, null);
  view.layout();
  document.body.dataset.ready = "true";
}

function legends() {
  const swatch = (name, text, extra = "") => el("span", { class: `key ${extra}` }, el("i", { class: `swatch ${name}` }), text);
  $("legend").replaceChildren(
    swatch("free", "free"), swatch("cached", "cached"), swatch("owned", "owned once"), swatch("s2", "2"), swatch("s3", "3"), swatch("s4", "4"),
    swatch("s5", "5+ owners"), swatch("new", "new in this step"),
    el("span", { class: "key dim", text: "full tone: slots with a token · pale: wasted · arrow: copy-on-write" }),
  );
  $("host-legend").replaceChildren(swatch("host-swapped", "swapped out: comes back"), swatch("host-kept", "offloaded: cached, may be dropped"));
  $("curve-legend").replaceChildren(
    swatch("line used", "used"), swatch("line shared-line", "shared"), swatch("line cached-line", "cached"), swatch("line wasted-line", "wasted, in pages"),
    swatch("mark", "preemption"),
  );
}

function wire() {
  $("slider").oninput = (event) => view.go(Number(event.target.value));
  $("first").onclick = () => view.go(0);
  $("last").onclick = () => view.go(view.log.numFrames - 1);
  $("back").onclick = () => view.go(view.frame - 1);
  $("next").onclick = () => view.go(view.frame + 1);
  $("play").onclick = () => view.play(!view.playing);
  $("rows").onscroll = () => view && showTables(view);
  const map = $("map");
  map.onpointermove = (event) => view.hover(view.map.at(event));
  map.onpointerleave = () => view.hover(-1);
  map.onclick = (event) => {
    const page = view.map.at(event);
    view.pinned = page === view.pinned ? -1 : page;
    if (page > 0) view.cursor = page;
    view.drawMap();
    view.inspect();
  };
  document.onkeydown = (event) => {
    const target = event.target, control = target.tagName === "SELECT" || event.ctrlKey || event.metaKey || event.altKey;
    if (control || !view) return;
    const big = event.shiftKey ? 10 : 1;
    if (target === map && event.key.startsWith("Arrow")) {
      const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -view.map.columns, ArrowDown: view.map.columns }[event.key];
      view.cursor = Math.max(1, Math.min(view.log.numPages - 1, view.cursor + move));
      view.pinned = view.cursor;
      view.drawMap();
      view.inspect();
    } else if (event.key === "ArrowRight") view.go(view.frame + big);
    else if (event.key === "ArrowLeft") view.go(view.frame - big);
    else if (event.key === "Home") view.go(0);
    else if (event.key === "End") view.go(view.log.numFrames - 1);
    else if (event.key === " " && target.tagName !== "BUTTON") view.play(!view.playing);
    else if (event.key === "Escape") view.pick(-1);
    else return;
    event.preventDefault();
  };
  let pending = 0;
  new ResizeObserver(() => { cancelAnimationFrame(pending); pending = requestAnimationFrame(() => view && view.layout()); }).observe($("map").parentElement);
  matchMedia("(prefers-color-scheme: dark)").onchange = () => { cssCache.clear(); view && view.layout(); };
  const runs = $("run");
  data.runs.forEach((run, i) => runs.append(el("option", { value: i, text: String(i + 1) })));
  $("run-label").hidden = data.runs.length < 2;
  runs.onchange = () => openRun(Number(runs.value)).catch(failed);
}

function failed(error) {
  $("problem").hidden = false;
  $("problem").textContent = `This page could not read its log: ${error}`;
}

legends();
inspectNothing();
wire();
openRun(0).catch(failed);

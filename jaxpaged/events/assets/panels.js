// What stands beside and below the map: the picked page or sequence, the step's events, the block tables.

const el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
};

const $ = (id) => document.getElementById(id);
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function chip(log, pool, value, logical, onPage) {
  if (value === 0) return el("span", { class: "chip gone", title: `logical ${logical}: freed behind the window`, text: "·" });
  if (value < 0) return el("span", { class: "chip host", title: `logical ${logical}: host page ${-1 - value}`, text: `h${-1 - value}` });
  const ref = pool.ref[value], state = ref > 1 ? `shared s${Math.min(ref, 5)}` : "owned";
  const part = log.hasWrites ? Math.round((100 * pool.fill[value]) / log.pageSize) : 100;
  const node = el("span", { class: `chip ${state}`, "data-page": value, text: String(value) });
  node.title = `logical ${logical}: page ${value}${ref > 1 ? `, shared by ${ref}` : ""}${log.hasWrites ? `, ${pool.fill[value]} of ${log.pageSize} tokens` : ""}`;
  node.style.setProperty("--part", `${part}%`);
  if (onPage) node.onpointerenter = () => onPage(value);
  return node;
}

function pageFacts(log, pool, page) {
  const ref = pool.ref[page], facts = [page === 0 ? "scratch: no sequence owns it" : STATE_NAMES[stateOf(pool, page)]];
  if (ref > 1) facts[0] = `shared by ${ref}`;
  if (log.hasWrites && (ref || pool.cached[page])) facts.push(`${pool.fill[page]} of ${log.pageSize} tokens`);
  if (pool.pins[page]) facts.push("pinned");
  return facts.join(" · ");
}

function inspectPage(view, page) {
  const { log, pool, frame } = view;
  $("inspect-title").textContent = `Page ${page}`;
  const owners = el("ul", { class: "owners" });
  for (const [seq, logical] of pool.owners(page)) {
    const button = el("button", { type: "button", class: "link", onclick: () => view.pick(seq) });
    button.append(el("b", { text: log.requestOf(seq) || "sequence" }), ` · ${log.seqs[seq]}`);
    owners.append(el("li", {}, button, el("span", { class: "dim", text: `[${logical}]` })));
  }
  const events = log.history(page), end = log.frameEnd[frame];
  let low = 0, high = events.length;
  while (low < high) { const middle = (low + high) >> 1; if (events[middle] < end) low = middle + 1; else high = middle; }
  const past = el("ol", { class: "past" });
  for (let i = low - 1; i >= Math.max(0, low - 9); i--) {
    const at = log.frameOfEvent(events[i]);
    const step = el("button", { type: "button", class: "link step", text: log.stepName(at), title: "Go to this step", onclick: () => view.go(at) });
    past.append(el("li", {}, step, el("span", { text: log.describe(events[i]) })));
  }
  const parts = [el("p", { class: "facts", text: pageFacts(log, pool, page) })];
  if (owners.children.length) parts.push(el("h3", { text: "Owners" }), owners);
  if (past.children.length) parts.push(el("h3", { text: "History, latest first" }), past);
  $("inspect").replaceChildren(...parts);
}

function inspectSequence(view, seq) {
  const { log, pool } = view, table = pool.tables.get(seq) || [];
  $("inspect-title").textContent = `${log.requestOf(seq) || "Sequence"} · ${log.seqs[seq]}`;
  const chips = el("div", { class: "chips all", id: "picked-table" });
  table.slice(0, 1500).forEach((value, logical) => chips.append(chip(log, pool, value, logical)));
  const held = table.filter((value) => value > 0).length, away = table.filter((value) => value < 0).length;
  const facts = [plural(pool.tokensOf(seq), "token"), plural(held, "page")];
  if (away) facts.push(`${away} on the host`);
  const shared = table.filter((value) => value > 0 && pool.ref[value] > 1).length;
  if (shared) facts.push(`${shared} shared`);
  const clear = el("button", { type: "button", class: "small", text: "Clear (Esc)", onclick: () => view.pick(-1) });
  $("inspect").replaceChildren(el("p", { class: "facts", text: table.length ? facts.join(" · ") : "holds no page in this step" }), chips, clear);
}

function inspectNothing() {
  $("inspect-title").textContent = "Nothing picked";
  $("inspect").replaceChildren(
    el("p", { class: "dim", text: "Point at a page for its owners and history; click it to keep it. Click a sequence below to see its pages on the map." }),
  );
}

const NOTABLE = ["preempt", "copy", "abort", "finish", "admit", "restore", "offload", "swap_out", "swap_in", "evict"];
const SUM_WORDS = {
  admit: "admitted", alloc: "allocated", share: "shared", copy: "copied", free: "let go", evict: "evicted", swap_out: "swapped out",
  swap_in: "swapped in", offload: "offloaded", restore: "restored", preempt: "preempted", finish: "finished", abort: "aborted",
  pin: "pinned", unpin: "unpinned",
};

function showEvents(view) {
  const { log, frame } = view, from = log.frameStart(frame), to = log.frameEnd[frame], sums = {}, found = [];
  let tokens = 0;
  for (let i = from; i < to; i++) {
    const kind = log.kinds[log.kind[i]];
    if (kind === "write") tokens += log.page[i];
    if (!SUM_WORDS[kind]) continue;
    sums[kind] = (sums[kind] || 0) + 1;
    if (NOTABLE.includes(kind) && found.length < 400) found.push([NOTABLE.indexOf(kind), i]);
  }
  $("happened-title").textContent = frame < log.numSteps ? "Since the step before" : "After the last step";
  const parts = Object.entries(sums).map(([kind, count]) => `${count} ${SUM_WORDS[kind]}`);
  if (tokens) parts.push(`${plural(tokens, "token")} written`);
  $("happened-sum").textContent = parts.join(" · ") || "No event.";
  found.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const shown = found.slice(0, 10).map(([, i]) => el("li", { "data-kind": log.kinds[log.kind[i]], text: log.describe(i) }));
  if (found.length > shown.length) shown.push(el("li", { class: "dim", text: `and ${found.length - shown.length} more` }));
  $("happened").replaceChildren(...shown);
}

const ROW_HEIGHT = 34;

// Rows are made for the visible part only; the list keeps its full height.
function showTables(view) {
  const { log, pool } = view, box = $("rows"), list = $("row-list");
  const seqs = [...pool.tables.keys()].sort((a, b) => log.run.seqRequest[a] - log.run.seqRequest[b] || a - b);
  list.style.height = `${seqs.length * ROW_HEIGHT}px`;
  const first = Math.max(0, Math.floor(box.scrollTop / ROW_HEIGHT) - 2);
  const visible = seqs.slice(first, first + Math.ceil(box.clientHeight / ROW_HEIGHT) + 4);
  const room = Math.max(4, Math.floor((box.clientWidth - (box.clientWidth < 640 ? 190 : 300)) / 36));
  const focused = document.activeElement && list.contains(document.activeElement) ? document.activeElement.closest("li").dataset.seq : null;
  const rows = visible.map((seq, i) => {
    const table = pool.tables.get(seq), chips = el("span", { class: "chips" });
    const cut = table.length > room ? room - 1 : table.length, skip = table.length - cut;
    if (skip > 0) chips.append(el("span", { class: "chip more", title: `${skip} pages before these`, text: `+${skip}` }));
    table.slice(skip).forEach((value, j) => chips.append(chip(log, pool, value, skip + j, (page) => view.hover(page))));
    const name = el("span", { class: "who" }, el("b", { text: log.requestOf(seq) || "sequence" }), el("span", { class: "dim", text: ` · ${log.seqs[seq]}` }));
    name.title = `${log.requestOf(seq)} · ${log.seqs[seq]}`;
    const button = el("button", { type: "button", "aria-pressed": String(view.picked === seq), onclick: () => view.pick(view.picked === seq ? -1 : seq) });
    button.append(name, el("span", { class: "tokens", text: String(pool.tokensOf(seq)) }), chips);
    const row = el("li", { "data-seq": log.seqs[seq], style: `top:${(first + i) * ROW_HEIGHT}px` }, button);
    return row;
  });
  list.replaceChildren(...rows);
  if (focused !== null) list.querySelector(`li[data-seq="${CSS.escape(focused)}"] button`)?.focus({ preventScroll: true });
  $("tables-hint").textContent = seqs.length
    ? `${plural(seqs.length, "sequence")} · tokens, then physical pages in logical order`
    : "No sequence holds a page in this step.";
}

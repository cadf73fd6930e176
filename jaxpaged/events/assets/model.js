// The log, decoded and replayed. A frame is the pool as the device sees it in one step, plus one last frame for the end.
//
// Columns of an event: kind, reason (bit 16: the freed page stays cached), sequence (of "admit" and "abort": request),
// logical index (of "write": position), page (of "write": tokens), source or host page (of "share" of a device page: tokens).
// -1 stands for none.

const K = {};

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Int32Array(await new Response(stream).arrayBuffer());
}

class Pool {
  constructor(log) {
    this.log = log;
    this.event = 0; // events applied
    this.ref = new Uint16Array(log.numPages);
    this.fill = new Uint16Array(log.numPages);
    this.cached = new Uint8Array(log.numPages);
    this.pins = new Uint16Array(log.numPages);
    this.hostRef = new Uint16Array(log.numHost);
    this.hostKept = new Uint8Array(log.numHost);
    this.hostFill = new Uint16Array(log.numHost);
    this.tables = new Map(); // sequence -> pages by logical index; 0: none, -1 - h: host page h
    this.tokens = new Map(); // sequence -> tokens written
    this.used = this.shared = this.numCached = this.filled = this.entries = this.hostUsed = 0;
  }

  clone() {
    const copy = Object.assign(Object.create(Pool.prototype), this);
    for (const name of ["ref", "fill", "cached", "pins", "hostRef", "hostKept", "hostFill"]) copy[name] = this[name].slice();
    copy.tables = new Map([...this.tables].map(([seq, table]) => [seq, table.slice()]));
    copy.tokens = new Map(this.tokens);
    return copy;
  }

  // Slots of its page at `logical` that a sequence's tokens fill.
  shareOf(seq, logical) {
    const size = this.log.pageSize;
    return Math.min(size, Math.max(0, (this.tokens.get(seq) || 0) - logical * size));
  }

  setFill(page, fill) {
    this.filled += fill - this.fill[page];
    this.fill[page] = fill;
  }

  clear(seq, logical) {
    const table = this.tables.get(seq);
    table[logical] = 0;
    while (table.length && table[table.length - 1] === 0) table.pop();
    if (!table.length) this.tables.delete(seq);
  }

  // `fresh`: the page has new content; `tokens`: what the sequence has with it.
  set(seq, logical, page, fresh, tokens) {
    let table = this.tables.get(seq);
    if (!table) this.tables.set(seq, (table = []));
    while (table.length < logical) table.push(0);
    table[logical] = page;
    if (this.cached[page]) { this.cached[page] = 0; this.numCached--; }
    if (fresh) this.fill[page] = 0;
    if (tokens > (this.tokens.get(seq) || 0)) this.tokens.set(seq, tokens);
    this.entries++;
    const count = ++this.ref[page];
    if (count === 1) { this.used++; this.filled += this.fill[page]; }
    if (count === 2) this.shared++;
    const fill = this.shareOf(seq, logical);
    if (fill > this.fill[page]) this.setFill(page, fill);
  }

  drop(seq, logical, page, stays) {
    this.clear(seq, logical);
    this.entries--;
    const count = --this.ref[page];
    if (count === 1) this.shared--;
    if (count && this.fill[page] < this.log.pageSize && this.shareOf(seq, logical) === this.fill[page]) {
      let fill = 0; // the others may have fewer tokens
      for (const [owner, table] of this.tables) if (table[logical] === page) fill = Math.max(fill, this.shareOf(owner, logical));
      this.setFill(page, fill);
    }
    if (count === 0) {
      this.used--;
      this.filled -= this.fill[page];
      if (stays) { this.cached[page] = 1; this.numCached++; }
    }
  }

  setHost(seq, logical, host) {
    let table = this.tables.get(seq);
    if (!table) this.tables.set(seq, (table = []));
    while (table.length < logical) table.push(0);
    table[logical] = -1 - host;
  }

  write(seq, position, tokens) {
    const size = this.log.pageSize, table = this.tables.get(seq) || [], end = position + tokens;
    for (let logical = Math.floor(position / size); logical * size < end; logical++) {
      if (table[logical] > 0) this.setFill(table[logical], Math.min(size, end - logical * size));
    }
    this.tokens.set(seq, end);
  }

  apply(i) {
    const { kind, reason, seq, logical, page, other } = this.log, size = this.log.pageSize;
    const s = seq[i], l = logical[i], p = page[i], o = other[i];
    switch (kind[i]) {
      case K.alloc: this.set(s, l, p, true, 0); break;
      case K.share:
        if (p < 0) { this.setHost(s, l, o); this.hostRef[o]++; break; }
        this.set(s, l, p, false, o >= 0 ? Math.min(o, l * size + this.fill[p]) : l * size + this.fill[p]);
        break;
      case K.copy:
        this.drop(s, l, o, false);
        this.set(s, l, p, true, 0);
        break;
      case K.free:
        if (p >= 0) this.drop(s, l, p, reason[i] >> 16);
        else {
          this.clear(s, l);
          if (--this.hostRef[o] === 0) this.hostUsed--;
        }
        if (!this.tables.has(s)) this.tokens.delete(s);
        break;
      case K.evict:
        if (p >= 0) { this.cached[p] = 0; this.numCached--; } else { this.hostKept[o] = 0; this.hostUsed--; }
        break;
      case K.swap_out: {
        const fill = this.fill[p];
        this.drop(s, l, p, reason[i] >> 16);
        this.setHost(s, l, o);
        if (this.hostRef[o]++ === 0) { this.hostUsed++; this.hostFill[o] = fill; }
        break;
      }
      case K.swap_in:
        this.set(s, l, p, this.ref[p] === 0, 0);
        if (--this.hostRef[o] === 0) this.hostUsed--;
        break;
      case K.offload:
        this.cached[p] = 0; this.numCached--;
        this.hostKept[o] = 1; this.hostUsed++; this.hostFill[o] = this.fill[p];
        break;
      case K.restore:
        this.hostKept[o] = 0; this.hostUsed--;
        this.set(s, l, p, true, l * size + this.hostFill[o]);
        break;
      case K.pin: this.pins[p]++; break;
      case K.unpin: this.pins[p]--; break;
      case K.write: this.write(s, l, p); break;
    }
    this.event = i + 1;
  }

  // Where the log lists no writes, what its pages could hold.
  tokensOf(seq) {
    if (this.log.hasWrites) return this.tokens.get(seq) || 0;
    return (this.tables.get(seq) || []).length * this.log.pageSize;
  }

  owners(page) {
    const found = [];
    for (const [seq, table] of this.tables) {
      const logical = table.indexOf(page);
      if (logical >= 0) found.push([seq, logical]);
    }
    return found;
  }

  counts() {
    const { used, shared, numCached, hostUsed, entries } = this;
    const wasted = this.log.hasWrites ? used * this.log.pageSize - this.filled : 0;
    return { used, owned: used - shared, shared, cached: numCached, free: this.log.numPages - 1 - used - numCached, host: hostUsed, entries, wasted };
  }
}

class Log {
  static async load(run) {
    const log = new Log();
    run.kinds.forEach((name, code) => (K[name] = code));
    const names = ["kind", "reason", "seq", "logical", "page", "other"];
    const columns = await Promise.all(run.events.map(unpack));
    names.forEach((name, i) => (log[name] = columns[i]));
    [log.stepNumber, log.centiseconds, log.running, log.waiting] = await Promise.all(run.steps.map(unpack));
    Object.assign(log, { run, kinds: run.kinds, reasons: run.reasons, requests: run.requests, seqs: run.seqs, length: log.kind.length });
    log.measure();
    log.index();
    return log;
  }

  measure() {
    const header = this.run.header;
    let pages = 0, host = 0;
    this.hasWrites = false;
    for (let i = 0; i < this.length; i++) {
      const kind = this.kind[i];
      if (kind === K.write) { this.hasWrites = true; continue; }
      if (this.page[i] > pages) pages = this.page[i];
      if (kind !== K.copy && (kind !== K.share || this.page[i] < 0) && this.other[i] > host) host = this.other[i];
    }
    this.pageSize = header.page_size || 1;
    this.numPages = header.num_pages || pages + 1;
    this.numHost = header.num_host_pages === undefined ? host + 1 : header.num_host_pages;
  }

  // One pass: where frames end, their series, and a copy of the pool every so many events to start a replay from.
  index() {
    const ends = [];
    for (let i = 0; i < this.length; i++) if (this.kind[i] === K.step) ends.push(i + 1);
    this.numSteps = ends.length;
    ends.push(this.length);
    this.frameEnd = Int32Array.from(ends);
    this.numFrames = ends.length;
    this.series = {};
    for (const name of ["used", "shared", "cached", "wasted", "host", "preempted", "copied", "entries"]) this.series[name] = new Float64Array(this.numFrames);
    const pool = new Pool(this), every = Math.max(20000, Math.ceil(this.length / 100));
    this.keyframes = [[-1, pool.clone()]];
    let since = 0;
    for (let frame = 0; frame < this.numFrames; frame++) {
      const from = pool.event;
      while (pool.event < this.frameEnd[frame]) {
        const kind = this.kind[pool.event];
        if (kind === K.preempt) this.series.preempted[frame]++;
        if (kind === K.copy) this.series.copied[frame]++;
        pool.apply(pool.event);
      }
      since += pool.event - from;
      if (since > every) { this.keyframes.push([frame, pool.clone()]); since = 0; }
      const counts = pool.counts();
      for (const name of ["used", "shared", "cached", "host", "entries"]) this.series[name][frame] = counts[name];
      this.series.wasted[frame] = counts.wasted / this.pageSize;
    }
  }

  // The pool at a frame; `from` is reused where it lies closer than the nearest copy.
  poolAt(frame, from) {
    let low = 0, high = this.keyframes.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.keyframes[middle][0] <= frame) low = middle; else high = middle - 1;
    }
    const end = this.frameEnd[frame], start = this.keyframes[low][1];
    const pool = from && from.event <= end && from.event >= start.event ? from : start.clone();
    while (pool.event < end) pool.apply(pool.event);
    return pool;
  }

  frameStart(frame) { return frame ? this.frameEnd[frame - 1] : 0; }

  frameOfEvent(i) {
    let low = 0, high = this.numFrames - 1;
    while (low < high) { const middle = (low + high) >> 1; if (this.frameEnd[middle] > i) high = middle; else low = middle + 1; }
    return low;
  }

  stepName(frame) { return frame < this.numSteps ? String(this.stepNumber[frame]) : "end"; }

  requestOf(seq) { const name = this.run.seqRequest[seq]; return name >= 0 ? this.requests[name] : ""; }

  // Events that touch a device page, in order; the lists of all pages lie in one array, built on first use.
  history(page) {
    if (!this.historyStart) {
      const start = new Int32Array(this.numPages + 2), each = (visit) => {
        for (let i = 0; i < this.length; i++) {
          const kind = this.kind[i];
          if (kind === K.write || kind === K.step) continue;
          if (this.page[i] > 0) visit(this.page[i], i);
          if (kind === K.copy) visit(this.other[i], i);
        }
      };
      each((p) => start[p + 2]++);
      for (let p = 2; p < start.length; p++) start[p] += start[p - 1];
      this.historyItems = new Int32Array(start[start.length - 1]);
      each((p, i) => (this.historyItems[start[p + 1]++] = i));
      this.historyStart = start;
    }
    return this.historyItems.subarray(this.historyStart[page], this.historyStart[page + 1]);
  }

  // An event in words.
  describe(i) {
    const kind = this.kinds[this.kind[i]], why = this.reasons[this.reason[i] & 0xffff], s = this.seq[i];
    const who = s >= 0 ? `${this.requestOf(s) || "sequence"} · ${this.seqs[s]}` : "";
    const p = this.page[i], o = this.other[i], at = this.logical[i] >= 0 ? ` [${this.logical[i]}]` : "";
    switch (kind) {
      case "admit": return `${this.requests[s] ?? ""} admitted`;
      case "abort": return `${this.requests[s] ?? ""} aborted`;
      case "alloc": return `page ${p} allocated to ${who}${at}`;
      case "share": return `${p >= 0 ? "page " + p : "host page " + o} shared with ${who}${at} (${why})`;
      case "copy": return `page ${o} copied to ${p} for ${who}${at} (${why})`;
      case "free": return `${p >= 0 ? "page " + p : "host page " + o} let go by ${who}${at}${why ? ` (${why})` : ""}${this.reason[i] >> 16 ? ", stays cached" : ""}`;
      case "evict": return p >= 0 ? `page ${p} evicted from the cache` : `host page ${o} evicted from the cache`;
      case "swap_out": return `page ${p} of ${who}${at} swapped out to host ${o}`;
      case "swap_in": return `host ${o} swapped in to page ${p} for ${who}${at}`;
      case "offload": return `page ${p} offloaded to host ${o}`;
      case "restore": return `host ${o} restored to page ${p} for ${who}${at}`;
      case "preempt": return `${who} preempted (${why})`;
      case "finish": return `${who} finished (${why})`;
      case "pin": return `page ${p} pinned`;
      case "unpin": return `page ${p} unpinned`;
      default: return kind;
    }
  }
}

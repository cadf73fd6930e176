"""A small deterministic page manager that logs what it does: an independent source of logs for the checker and the page.

It knows no tokens: a request has lengths and perhaps a prefix family, whose members begin alike. Its own tables and counts
are what a replay of its log must rebuild.
"""

import collections
import dataclasses
import random

from jaxpaged.config import SchedulerConfig
from jaxpaged.scheduler.events import EventLog


@dataclasses.dataclass(eq=False)
class Group:
    """One request: its sequences, by id, with the tokens written so far."""

    name: str
    prompt: int
    output: int
    n: int
    beam: bool
    family: int | None
    prefix: int
    written: dict[int, int] = dataclasses.field(default_factory=dict)
    swapped: bool = False

    def key(self, seq: int, logical: int, size: int):
        """What the prefix index would know the page by."""
        if (logical + 1) * size <= self.prefix:
            return ("family", self.family, logical)
        return (self.name, seq if (logical + 1) * size > self.prompt else 0, logical)


class Sim:
    """Runs random requests; ``run`` returns when all have ended (or after ``max_steps``)."""

    def __init__(
        self, path, *, seed=0, requests=20, page_size=4, num_pages=24, host_pages=16, offload=False, clock=None, scale=1
    ):
        self.config = SchedulerConfig(
            page_size=page_size, num_pages=num_pages, num_host_pages=host_pages, max_num_seqs=64,
            max_num_batched_tokens=4096, max_model_len=4096, offload_cached_pages=offload,
        )  # fmt: skip
        self.log = EventLog(path, config=self.config, **({"clock": clock} if clock else {}))
        self.rng = random.Random(seed)
        self.size, self.offload = page_size, offload
        self.free = collections.deque(range(1, num_pages))
        self.host_free = list(range(host_pages))[::-1]
        self.ref = collections.Counter()
        self.tables: dict[int, dict[int, int]] = {}
        self.host_tables: dict[int, dict[int, int]] = {}
        self.key_of: dict[int, tuple] = {}
        self.known: dict[tuple, int] = {}
        self.cached: dict[int, None] = {}  # oldest first
        self.away: dict[tuple, int] = {}  # offloaded: key -> host page
        self.seqs = 0
        self.arrivals = 0
        self.step = 0
        self.waiting = collections.deque(self.request(i, scale) for i in range(requests))
        self.running: list[Group] = []
        self.writes: list[list[int]] = []
        self.trace: list[dict] = []

    def request(self, i, scale):
        rng = self.rng
        family = rng.choice([None, None, 0, 1])
        prefix = 0 if family is None else self.size * rng.randint(1, 4) * scale
        n = rng.choice([1, 1, 2, 3])
        return Group(
            f"req-{i}",
            prefix + rng.randint(1, 12 * scale),
            rng.randint(1, 14 * scale),
            n,
            n > 1 and rng.random() < 0.4,
            family,
            prefix,
        )

    # -- pages

    def new_page(self):
        if not self.free and self.cached:
            page = next(iter(self.cached))
            del self.cached[page]
            key = self.key_of.pop(page)
            del self.known[key]
            if self.offload and self.host_free:
                host = self.away[key] = self.host_free.pop()
                self.log.emit("offload", page=page, host=host, before=0, after=0)
            else:
                self.log.emit("evict", page=page, before=0, after=0)
            self.free.append(page)
        return self.free.popleft() if self.free else None

    def emit(self, kind, group, seq, logical, page, before, after, why=None, **extra):
        self.log.emit(
            kind, request=group.name, seq=seq, logical=logical, page=page, before=before, after=after, why=why, **extra
        )

    def alloc(self, group, seq, logical):
        page = self.new_page()
        if page is None:
            return False
        self.ref[page] = 1
        self.tables.setdefault(seq, {})[logical] = page
        self.emit("alloc", group, seq, logical, page, 0, 1)
        return True

    def share(self, group, seq, logical, page, why):
        before = self.ref[page]
        self.ref[page] += 1
        self.cached.pop(page, None)
        self.tables.setdefault(seq, {})[logical] = page
        self.emit("share", group, seq, logical, page, before, before + 1, why)

    def drop(self, group, seq, logical, kind="free", **extra):
        page = self.tables[seq].pop(logical)
        self.ref[page] -= 1
        cached = page in self.key_of
        if not self.ref[page]:
            del self.ref[page]
            if cached:
                self.cached[page] = None
            else:
                self.free.append(page)
        self.emit(kind, group, seq, logical, page, self.ref[page] + 1, self.ref[page], cached=cached, **extra)

    def drop_all(self, group, seq, why):
        for logical in sorted(self.tables.get(seq, {}), reverse=True):
            self.drop(group, seq, logical, why=why)
        self.tables.pop(seq, None)

    # -- groups

    def fork(self, group, parent, why):
        self.seqs += 1
        for logical, page in sorted(self.tables[parent].items()):
            self.share(group, self.seqs, logical, page, why)
        group.written[self.seqs] = group.written[parent]

    def preempt(self, group):
        pages = {page for seq in group.written for page in self.tables.get(seq, {}).values()}
        swap = len(group.written) > 1 and len(pages) <= len(self.host_free)
        to_host = {}
        for seq in list(group.written):
            self.log.emit("preempt", request=group.name, seq=seq, why="swap" if swap else "recompute")
            if not swap:
                self.drop_all(group, seq, "preempt")
                continue
            for logical, page in sorted(self.tables.get(seq, {}).items()):
                host = to_host.get(page)
                if host is None:
                    host = to_host[page] = self.host_free.pop()
                self.host_tables.setdefault(seq, {})[logical] = host
                self.drop(group, seq, logical, "swap_out", host=host)
            self.tables.pop(seq, None)
        group.swapped = swap
        if not swap:
            group.written = dict.fromkeys(list(group.written)[:1], 0) if group.n == 1 else {}
            for seq in group.written:
                group.written[seq] = 0
        self.running.remove(group)
        self.waiting.appendleft(group)

    def resume(self, group):
        hosts = {host for seq in group.written for host in self.host_tables.get(seq, {}).values()}
        if len(hosts) > len(self.free) + len(self.cached):
            return False
        to_page = {}
        for seq in group.written:
            for logical, host in sorted(self.host_tables.pop(seq, {}).items()):
                page = to_page.get(host)
                if page is None:
                    page = to_page[host] = self.new_page()
                before = self.ref[page]
                self.ref[page] += 1
                self.tables.setdefault(seq, {})[logical] = page
                self.emit("swap_in", group, seq, logical, page, before, before + 1, host=host)
        self.host_free.extend(to_page)
        group.swapped = False
        return True

    def admit(self, group):
        if group.swapped:
            return self.resume(group)
        if -(-group.prompt // self.size) > len(self.free) + len(self.cached):
            return False
        self.log.emit("admit", request=group.name, prompt=group.prompt)
        if not group.written:
            self.seqs += 1
            group.written[self.seqs] = 0
        (seq,) = group.written
        for logical in range((group.prompt - 1) // self.size):
            key = group.key(seq, logical, self.size)
            if key in self.known:
                self.share(group, seq, logical, self.known[key], "prefix")
            elif key in self.away and (page := self.new_page()) is not None:
                host = self.away.pop(key, None)
                if host is None:  # lost to make room
                    self.free.appendleft(page)
                    break
                self.host_free.append(host)
                self.ref[page] = 1
                self.key_of[page] = key
                self.known[key] = page
                self.tables.setdefault(seq, {})[logical] = page
                self.emit("restore", group, seq, logical, page, 0, 1, "hit", host=host)
            else:
                break
            group.written[seq] += self.size
        return True

    def grow(self, group, seq):
        """Pages for this step's writes of a sequence; False where there are none."""
        start = group.written[seq]
        count = max(1, group.prompt - start)
        for logical in range(start // self.size, (start + count - 1) // self.size + 1):
            page = self.tables.get(seq, {}).get(logical)
            if page is None and not self.alloc(group, seq, logical):
                return False
            if page is not None and self.ref[page] > 1:
                new = self.new_page()
                if new is None:
                    return False
                self.ref[page] -= 1
                self.ref[new] = 1
                self.tables[seq][logical] = new
                why = "beam" if group.beam else "fork"
                self.log.emit("copy", request=group.name, seq=seq, logical=logical, page=new, src=page,
                              before=self.ref[page] + 1, after=self.ref[page], why=why)  # fmt: skip
        self.writes.append([seq, start, count])
        return True

    def one_step(self):
        self.log.begin_step(self.step)
        self.writes = []
        arrived = len(self.waiting) if self.arrivals > 3 else 2
        while self.waiting and arrived and len(self.running) < 12 and self.admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
            arrived -= 1
        self.arrivals += 1
        for group in list(self.running):
            if group not in self.running:
                continue
            while True:
                done = [write for write in self.writes if write[0] in group.written]
                pending = [seq for seq in group.written if seq not in {write[0] for write in done}]
                if all(self.grow(group, seq) for seq in pending):
                    break
                victim = self.running[-1]
                self.writes = [write for write in self.writes if write[0] not in victim.written]
                self.preempt(victim)
                if victim is group:
                    break
        owner = {seq: group for group in self.running for seq in group.written}
        for seq, start, count in self.writes:
            group = owner[seq]
            group.written[seq] += count
            for logical in range(start // self.size, (start + count) // self.size):
                key, page = group.key(seq, logical, self.size), self.tables[seq][logical]
                if key not in self.known and page not in self.key_of and key not in self.away:
                    self.known[key], self.key_of[page] = page, key
        slots: dict[int, int] = {}
        for seq, table in self.tables.items():
            for logical, page in table.items():
                slots[page] = min(self.size, owner[seq].written[seq] - logical * self.size)
        counts = {
            "tokens": sum(count for _, _, count in self.writes),
            "used": len(self.ref),
            "shared": sum(1 for count in self.ref.values() if count > 1),
            "cached": len(self.cached),
            "free": len(self.free),
            "wasted": len(self.ref) * self.size - sum(slots.values()),
            "running": len(self.running),
            "waiting": len(self.waiting),
        }
        self.log.emit("step", **counts, writes=self.writes)
        self.trace.append(
            {
                "step": self.step,
                **counts,
                "tables": {seq: dict(table) for seq, table in self.tables.items()},
                "ref": dict(self.ref),
            }
        )
        for group in list(self.running):
            self.advance(group)
        self.step += 1

    def advance(self, group):
        for seq, written in list(group.written.items()):
            if written >= group.prompt + group.output:
                self.drop_all(group, seq, "finish")
                self.log.emit("finish", request=group.name, seq=seq, why="length", tokens=written)
                del group.written[seq]
        if not group.written:
            self.running.remove(group)
            return
        first = next(iter(group.written))
        if len(group.written) == 1 and group.n > 1 and group.written[first] == group.prompt:
            for _ in range(group.n - 1):
                self.fork(group, first, "beam" if group.beam else "fork")
        elif group.beam and len(group.written) > 1 and self.rng.random() < 0.3:
            lost = list(group.written)[-1]
            self.drop_all(group, lost, "beam")
            self.log.emit("finish", request=group.name, seq=lost, why="beam")
            del group.written[lost]
            self.fork(group, first, "beam")

    def run(self, max_steps=100_000):
        while (self.waiting or self.running) and self.step < max_steps:
            self.one_step()
        self.log.close()
        return self

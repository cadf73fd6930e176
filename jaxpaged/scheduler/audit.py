"""Looks at the memory manager from outside: how full it is, and whether its books agree."""

from collections import Counter
from typing import NamedTuple

from jaxpaged.errors import InvariantError
from jaxpaged.scheduler.kv_manager import KVManager
from jaxpaged.scheduler.sequence_state import SeqState, Status


class Usage(NamedTuple):
    """How the pool is used.

    Attributes:
        logical: block-table entries.
        used: pages named by at least one table.
        shared: pages named by more than one.
        cached: pages no table names but the prefix index can find.
        free: the others (the scratch page left out).
        wasted: slots of used pages that hold no token.
    """

    logical: int
    used: int
    shared: int
    cached: int
    free: int
    wasted: int


def measure(kv: KVManager, states: list[SeqState]) -> Usage:
    """Measures the pool. Only a sequence's last page can have empty slots; a shared last page counts once.

    Args:
        kv: the memory manager.
        states: the running sequences.
    """
    page_size = kv.page_size
    empty: dict[int, int] = {}
    logical = 0
    for state in states:
        size = len(state.table)
        logical += size - state.num_behind
        unused = size * page_size - state.seq.num_computed_tokens
        if unused > 0:
            page = state.table[-1]
            empty[page] = min(unused, empty.get(page, page_size))
    pool = kv.pool
    shared = pool.num_used - pool.ref_cnt.count(1) if logical > pool.num_used else 0
    cached = pool.num_cached
    return Usage(logical, pool.num_used, shared, cached, pool.usable - pool.num_used - cached, sum(empty.values()))


def check(kv: KVManager, states: list[SeqState]) -> None:
    """Compares pool, host store and prefix index with the tables of all live sequences.

    Args:
        kv: the memory manager.
        states: every live sequence.

    Raises:
        InvariantError: they disagree; the message says where.
    """
    kv.pool.check(Counter(page for state in states for page in state.table if page))
    kv.host.check(Counter(page for state in states for page in state.host_table if page >= 0))
    for key, entry in kv.cache.index.items():
        if kv.cache.index.key_of.get(entry.page) != key or not kv.pool.findable[entry.page]:
            raise InvariantError(f"the prefix index points at page {entry.page}, which does not carry that key")
        if (key in kv.cache.pinned_keys) != (entry.page in kv.pool.pins):
            raise InvariantError(f"page {entry.page}: its key and the page disagree on being pinned")
    if len(kv.cache.index) != sum(kv.pool.findable):
        raise InvariantError(f"{sum(kv.pool.findable)} pages are findable but the prefix index has {len(kv.cache.index)}")
    for state in states:
        _check_state(kv, state)


def _check_state(kv: KVManager, state: SeqState) -> None:
    seq, table = state.seq, state.table
    named = [page for page in table if page]
    if len(set(named)) != len(named):
        raise InvariantError(f"sequence {seq.seq_id} names a page twice: {table}")
    if state.status is Status.RUNNING:
        if len(table) != -(-seq.num_computed_tokens // kv.page_size):
            raise InvariantError(f"sequence {seq.seq_id}: {len(table)} pages for {seq.num_computed_tokens} tokens")
        if seq.num_computed_tokens % kv.page_size and kv.pool.findable[table[-1]]:
            raise InvariantError(f"sequence {seq.seq_id} would write to page {table[-1]}, which is findable")
        if not all(table[state.num_behind :]):
            raise InvariantError(f"sequence {seq.seq_id} lacks a page it can still see: {table}")
    elif table or (state.host_table and state.status is not Status.SWAPPED):
        raise InvariantError(f"sequence {seq.seq_id} is {state.status.name} but holds pages")

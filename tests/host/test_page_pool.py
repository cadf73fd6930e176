"""The page pool by itself, with literal page ids."""

import random
from collections import Counter

import numpy as np
import pytest

from jaxpaged.errors import InvariantError
from jaxpaged.scheduler.host_store import HostStore
from jaxpaged.scheduler.page_pool import PagePool
from jaxpaged.scheduler.prefix_index import ROOT_KEY, PrefixEntry


def findable(pool, page):
    pool.mark_findable(page)
    return page


def test_forty_tokens_take_three_pages_in_free_order():
    """R2: 40 tokens, pages of 16, free list [41, 7, 19, 2, 33]: table [41, 7, 19], 8 slots unused; 2,048 reserved: 2,008."""
    pool = PagePool(50, free_order=[41, 7, 19, 2, 33])
    table = [pool.allocate() for _ in range(-(-40 // 16))]
    assert table == [41, 7, 19]
    assert len(table) * 16 - 40 == 8 and 2048 - 40 == 2008
    keys = np.random.default_rng(0).normal(size=(40, 8))
    pages = np.full((50, 16, 8), np.nan)
    for position in range(40):
        pages[table[position // 16], position % 16] = keys[position]
    gathered = pages[table].reshape(-1, 8)[:40]
    np.testing.assert_array_equal(gathered, keys)


def test_page_zero_is_never_handed_out():
    pool = PagePool(4)
    assert [pool.allocate() for _ in range(3)] == [1, 2, 3]
    with pytest.raises(InvariantError, match="empty pool"):
        pool.allocate()


def test_freed_pages_can_be_used_again_at_once():
    """R6: pages of a finished sequence serve the next one; free pages are used oldest first."""
    pool = PagePool(4)
    first = [pool.allocate(), pool.allocate()]
    pool.release_all(first)
    assert [pool.allocate() for _ in range(3)] == [3, 1, 2]


def test_allocation_fails_only_when_nothing_is_free():
    """R4, R5: 5,000 random operations: any free page serves anybody; free + cached + used is always the whole pool."""
    rng, pool, held = random.Random(0), PagePool(9), []
    for _ in range(5000):
        if rng.random() < 0.5:
            if pool.num_available:
                page = pool.allocate()
                assert page not in held
                held.append(page)
                if rng.random() < 0.4:
                    pool.mark_findable(page)
            else:
                assert len(set(held)) == 8
        elif held:
            if rng.random() < 0.3:
                page = rng.choice(held)
                assert pool.share(page) == held.count(page)
                held.append(page)
            else:
                page = held.pop(rng.randrange(len(held)))
                assert pool.release(page) == held.count(page)
        pool.check(Counter(held))
    pool.release_all(held)
    pool.check(Counter())
    assert pool.num_available == 8 and pool.num_used == 0


def test_freeing_too_often_changes_nothing():
    """B07: a page listed twice with count 1 is an error, and no count moves."""
    pool = PagePool(5)
    page, other = pool.allocate(), pool.allocate()
    with pytest.raises(InvariantError, match=f"page {page} is to be freed 2 times"):
        pool.release_all([other, page, page])
    assert pool.ref_cnt[page] == pool.ref_cnt[other] == 1 and pool.num_available == 2
    pool.release_all([page, other])
    for bad in (page, 0, 7):
        with pytest.raises(InvariantError):
            pool.release_all([bad])
    with pytest.raises(InvariantError, match="once too often"):
        pool.release(page)
    assert pool.num_available == 4
    pool.check(Counter())


def test_cached_pages_are_taken_last_and_oldest_first():
    """R14: free pages go first, then cached ones in the order they were let go; a hit makes a page young again."""
    evicted = []
    pool = PagePool(6, on_evict=evicted.append)
    pages = [findable(pool, pool.allocate()) for _ in range(3)]
    for page in reversed(pages):  # a sequence lets its last page go first
        pool.release(page)
    assert pool.num_cached == 3
    assert pool.share(2) == 0
    pool.release(2)
    assert [pool.allocate() for _ in range(5)] == [4, 5, 3, 1, 2]
    assert evicted == [3, 1, 2]


def test_a_free_page_cannot_be_shared():
    pool = PagePool(3)
    with pytest.raises(InvariantError, match="page 1 is free"):
        pool.share(1)


def test_pinned_pages_are_never_taken():
    """R13: a pinned page stays findable however full the pool gets, and is ordinary again after the last unpin."""
    pool = PagePool(3)
    page = findable(pool, pool.allocate())
    assert pool.pin(page) == 0 and pool.pin(page) == 1
    pool.release(page)
    assert pool.num_available == 1 and pool.num_cached == 1
    pool.check(Counter())
    other = pool.allocate()
    with pytest.raises(InvariantError):
        pool.allocate()
    assert pool.unpin(page) == 1 and pool.num_available == 0
    assert pool.unpin(page) == 0 and pool.allocate() == page
    pool.check(Counter([page, other]))


def test_a_page_read_by_a_copy_is_held_back_until_the_plan_ends():
    pool = PagePool(3)
    page = pool.allocate()
    pool.hold_back(page)
    pool.release(page)
    assert pool.num_available == 1
    pool.check(Counter())
    pool.end_step(0)
    assert pool.num_available == 2


def test_only_pages_free_since_before_the_plan_are_reported():
    """Poisoning must not touch a page this step's plan still reads, nor one that was handed out again."""
    pool = PagePool(5)
    a, b, c = pool.allocate(), pool.allocate(), pool.allocate()
    pool.release_all([a, b])
    before = pool.num_freed
    assert pool.allocate() == 4
    assert pool.allocate() == a
    pool.release(c)
    assert pool.end_step(before) == (b,)
    before = pool.num_freed
    assert [pool.allocate(), pool.allocate()] == [b, c]
    pool.release_all([c])
    assert pool.end_step(before) == ()  # free again, but the plan used it
    assert pool.end_step(pool.num_freed) == (c,)
    assert pool.end_step(pool.num_freed) == ()


def test_a_broken_book_is_noticed():
    pool = PagePool(4)
    page = pool.allocate()
    with pytest.raises(InvariantError, match="count 1, but 0 tables"):
        pool.check(Counter())
    pool._free.append(page)
    with pytest.raises(InvariantError, match="2 states"):
        pool.check(Counter([page]))


def entry(depth=0):
    return PrefixEntry(5, ROOT_KEY, depth, (1, 2))


def test_offloaded_pages_make_way_for_swaps_oldest_first():
    """R20, R21: host memory is bounded; swaps may take what cached pages use, never the reverse."""
    dropped = []
    host = HostStore(2, on_drop=dropped.append)
    assert [host.put(b"a", entry()), host.put(b"b", entry())] == [0, 1]
    assert host.put(b"a", entry()) is None
    assert host.num_available == 2
    host.hold_back(1)
    assert host.num_available == 1
    page = host.allocate()
    host.share(page)
    assert (page, dropped) == (0, [0])
    assert host.put(b"c", entry()) is None
    with pytest.raises(InvariantError, match="full store"):
        host.allocate()
    host.check(Counter([0]))
    host.end_step()
    assert host.release(0) == 0
    host.check(Counter())


def test_a_host_page_read_by_a_restore_is_free_from_the_next_step():
    host = HostStore(1)
    assert host.put(b"a", entry()) == 0
    assert host.restored(0).token_ids == (1, 2)
    assert host.num_available == 0 and host.put(b"b", entry()) is None
    host.end_step()
    assert host.put(b"b", entry()) == 0

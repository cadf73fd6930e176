"""Prefix keys and what may be found under them."""

import os
import subprocess
import sys

import pytest

from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler import prefix_cache
from jaxpaged.scheduler.prefix_index import ROOT_KEY, PrefixEntry, PrefixIndex, extra_keys, page_key
from tests.host.fakes import Harness, expect_lone, request

ONE = SamplingParams(max_tokens=1)


def serve(harness, name, prompt, params=ONE, **fields):
    req = harness.add(request(name, prompt, params, **fields))
    harness.run()
    expect_lone(req)
    return req


def cached(req):
    return req.sequences[0].num_cached_tokens


def test_the_key_is_the_documented_bytes():
    """Literal SHA-256 of the tagged, length-prefixed fields: other processes and releases must find the same."""
    import hashlib

    tokens = b"".join(t.to_bytes(8, "little") for t in (1, 2, 3, 4))
    data = b"P" + (32).to_bytes(8, "little") + bytes(32) + b"T" + (32).to_bytes(8, "little") + tokens
    data += b"S" + (1).to_bytes(8, "little") + b"x"
    assert page_key(ROOT_KEY, [1, 2, 3, 4], extra_keys(cache_salt="x")) == hashlib.sha256(data).digest()


def test_keys_do_not_depend_on_the_process():
    """B01: two processes with different hash seeds compute the same keys."""
    code = (
        "from jaxpaged.scheduler.prefix_index import ROOT_KEY, page_key; first = page_key(ROOT_KEY, range(1, 5), b'');"
        "print(first.hex(), page_key(first, range(5, 9), b'').hex())"
    )
    outs = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outs) == 1 and len(outs.pop().split()) == 2


def test_everything_that_matters_is_in_the_key():
    """B01: another parent, salt, format or token gives another key; a salt "x" is not an adapter "x"."""
    keys = [
        page_key(ROOT_KEY, (1, 2), b""),
        page_key(b"\1" * 32, (1, 2), b""),
        page_key(ROOT_KEY, (1, 3), b""),
        page_key(ROOT_KEY, (1,), b""),
        page_key(ROOT_KEY, (1, 2), extra_keys(cache_salt="x")),
        page_key(ROOT_KEY, (1, 2), extra_keys(adapter="x")),
        page_key(ROOT_KEY, (1, 2), extra_keys(kv_dtype="x")),
        page_key(ROOT_KEY, (1, 2), extra_keys(cache_salt="x", kv_dtype="y")),
        page_key(ROOT_KEY, (1, 2), extra_keys(cache_salt="xy")),
    ]
    assert len(set(keys)) == len(keys)


def test_tokens_are_compared_even_if_all_keys_collide(monkeypatch):
    """B01: with a constant hash the second prompt finds nothing and comes out right."""
    monkeypatch.setattr(prefix_cache, "page_key", lambda parent, tokens, extras: b"same")
    harness = Harness()
    serve(harness, "a", range(1, 9))
    assert cached(serve(harness, "b", [11, 10, 9, 8, 7, 6, 5, 4])) == 0
    assert cached(serve(harness, "c", [1, 2, 3, 4, 1, 2, 3, 4, 1])) == 4  # right page first, then not again one page later


def test_an_entry_is_verified():
    index = PrefixIndex()
    assert index.add(b"k", PrefixEntry(7, ROOT_KEY, 0, (1, 2)))
    assert not index.add(b"k", PrefixEntry(8, ROOT_KEY, 0, (1, 2)))
    assert index.find(b"k", ROOT_KEY, 0, [1, 2]).page == 7
    assert index.find(b"k", ROOT_KEY, 0, [1, 3]) is None
    assert index.find(b"k", ROOT_KEY, 1, [1, 2]) is None
    assert index.find(b"k", b"p", 0, [1, 2]) is None
    assert index.remove(7)[0] == b"k" and len(index) == 0 and index.find(b"k", ROOT_KEY, 0, [1, 2]) is None


@pytest.mark.parametrize("length, hit", [(1, 0), (4, 0), (5, 4), (7, 4), (8, 4), (12, 8)])
def test_one_token_at_least_is_computed(length, hit):
    """B02: a prompt sent three times, alone and beside two uncached ones: len - 1 tokens at most are found, in whole pages."""
    for others in (0, 2):
        harness = Harness(num_pages=40)
        prompt = list(range(1, length + 1))
        serve(harness, "first", prompt)
        for again in ("second", "third"):
            for i in range(others):
                harness.add(request(f"{again}{i}", [11, i + 1, 9, 7, again == "third"], ONE))
            assert cached(serve(harness, again, prompt)) == hit
        if length == 8:
            assert cached(serve(harness, "longer", [*prompt, 9, 10, 11, 1])) == 8


def test_equal_prompts_in_one_step_do_not_hit_each_other():
    """B04: a page is found only after the step that writes it was dispatched: four copies at once are each right, and a
    fifth, sent while the first still decodes, finds two pages."""
    prompt = [*range(1, 12), 1]
    for pipelined in (False, True):
        harness = Harness(num_pages=60, max_num_batched_tokens=8, pipelined=pipelined)
        params = SamplingParams(max_tokens=20)
        four = [harness.add(request(f"r{i}", prompt, params)) for i in range(4)]
        while not four[0].sequences[0].num_generated_tokens:
            harness.step()
        assert not four[0].finished
        fifth = harness.add(request("fifth", prompt, params))
        harness.run()
        for req in [*four, fifth]:
            expect_lone(req)
        assert cached(four[0]) == 0 and cached(fifth) == 8


def test_a_page_filled_in_this_step_is_not_found_in_this_step():
    """Three states of a page: allocated and being written is not findable; in the next step it is."""
    harness = Harness(max_num_batched_tokens=64)
    first = harness.add(request("a", 9, ONE))
    second = harness.add(request("b", 9, ONE))
    output = harness.dispatch()
    assert [row.num_tokens for row in output.scheduled] == [9, 9]
    third = harness.add(request("c", 9, ONE))
    output = harness.dispatch()
    assert [(row.num_computed_tokens, row.num_tokens) for row in output.scheduled] == [(8, 1)]
    assert output.scheduled[0].page_ids[:2] == (1, 2)
    harness.collect()
    harness.collect()
    assert (cached(first), cached(second), cached(third)) == (0, 0, 8)
    harness.rest_check()


def test_history_that_was_edited_is_not_reused():
    """B05: a 7-token prompt answered with X fills its second page; a continuation with another token there finds one page."""
    harness = Harness(num_pages=30)
    prompt = list(range(1, 8))
    x = serve(harness, "turn1", prompt, SamplingParams(max_tokens=2)).sequences[0].generated_token_ids[0]
    y = (x + 1) % 12
    more = [3, 1, 4, 1, 5, 9, 2, 6]
    assert cached(serve(harness, "edited", [*prompt, y, *more])) == 4
    assert cached(serve(harness, "kept", [*prompt, x, *more])) == 8


def test_a_sampled_token_that_never_ran_is_not_in_the_index():
    """B05: a page whose last token was sampled but not run through the model holds no key-value pair for it."""
    for pipelined in (False, True):
        harness = Harness(pipelined=pipelined)
        req = serve(harness, "a", 7, ONE)  # token 8 is sampled, never computed
        again = serve(harness, "b", [*range(1, 8), *req.sequences[0].generated_token_ids, 1, 1])
        assert cached(again) == 4


def test_salts_and_formats_keep_tenants_apart():
    """R7, B01: equal prompts under different salts never share a page."""
    harness = Harness(num_pages=30)
    serve(harness, "a", 9, cache_salt="tenant 1")
    assert cached(serve(harness, "b", 9, cache_salt="tenant 2")) == 0
    assert cached(serve(harness, "c", 9)) == 0
    assert cached(serve(harness, "d", 9, cache_salt="tenant 1")) == 8


def test_same_words_after_another_beginning_miss():
    """R14: the key of a page is the key of its whole beginning."""
    harness = Harness(num_pages=30)
    serve(harness, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cached(serve(harness, "b", [9, 9, 9, 9, 5, 6, 7, 8, 9])) == 0


def test_eviction_takes_the_longer_beginning_first():
    """R14: of an idle sequence the last page is evicted first, so the common beginning lives longest."""
    harness = Harness(num_pages=4)
    serve(harness, "a", 9)  # pages 1, 2 full and cached; page 3 free
    serve(harness, "b", [7, 7, 7, 7, 7])  # needs two pages: 3, then evicts page 2
    assert cached(serve(harness, "c", 9)) == 4


def test_switched_off_it_leaves_no_trace():
    harness = Harness(enable_prefix_caching=False)
    serve(harness, "a", 9)
    assert cached(serve(harness, "b", 9)) == 0
    assert harness.scheduler.stats().num_cached_pages == 0
    assert len(harness.scheduler._kv.cache.index) == 0

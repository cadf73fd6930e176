"""A state machine over the scheduler: any operation in any order, page contents and integrity checked after each."""

import collections
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.host.scheduler_driver import Driver


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis chooses the operations; what each draws comes from a seed hypothesis chooses."""

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed):
        self.driver = Driver(random.Random(seed))

    @rule()
    def add(self):
        self.driver.add()

    @rule()
    def fork(self):
        self.driver.fork()

    @rule()
    def abort(self):
        self.driver.abort()

    @rule()
    def pin(self):
        self.driver.pin()

    @rule()
    def unpin(self):
        self.driver.unpin()

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.driver.step()

    @rule(times=st.integers(1, 6))
    def pipelined_steps(self, times):
        for _ in range(times):
            self.driver.dispatch()

    @rule()
    def collect(self):
        self.driver.collect()

    @invariant()
    def books_agree(self):
        if hasattr(self, "driver"):
            self.driver.harness.scheduler.check_integrity()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase


def _run(seeds, operations):
    totals = collections.Counter()
    for seed in seeds:
        driver = Driver(random.Random(seed))
        for _ in range(operations):
            driver.operation()
        stats = driver.harness.scheduler.stats()
        totals.update(driver.counts)
        totals.update(
            preemptions=stats.num_preemptions, copies=stats.num_page_copies, cached=stats.num_cached_tokens,
            swapped_out=stats.num_swapped_out_pages, swapped_in=stats.num_swapped_in_pages, steps=stats.num_steps,
            restores=sum(len(o.restores) for o in driver.harness.outputs),
        )  # fmt: skip
        driver.drain()
    return totals


def test_random_operations_touch_everything():
    """The random runs are not idle: they preempt, copy, swap both ways, hit the cache, fork and refuse."""
    totals = _run(range(40), 250)
    for what in (
        "preemptions",
        "copies",
        "cached",
        "swapped_out",
        "swapped_in",
        "restores",
        "forked",
        "aborted",
        "pinned",
        "refused",
    ):
        assert totals[what] > 5, (what, totals)
    assert totals["verified"] > 500


@pytest.mark.long
def test_two_hundred_thousand_operations():
    """200,000 random operations over 400 schedulers: no invariant broken, every request as if alone."""
    totals = _run(range(1000, 1400), 500)
    assert totals["verified"] > 10_000

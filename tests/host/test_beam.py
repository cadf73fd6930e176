"""Beam search: the arithmetic against a whole-vocabulary reference and ``transformers``, and its pages with literal ids."""

import functools
import random

import numpy as np
import pytest

from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler.beam import BeamSearch, num_candidates
from tests.host.beam_reference import beam_reference
from tests.host.fakes import EOS, Harness, beam_params, expect_lone, request


def search(prompt, log_probs, params, stop_ids, max_tokens):
    """Feeds ``BeamSearch`` with the best candidates of each beam. Returns ``[(tokens, sum, score)]`` and the steps taken."""
    engine = BeamSearch(params, frozenset(stop_ids), max_tokens)
    beams = [([], [], 0.0)]
    steps = 0
    while not engine.done:
        candidates = []
        for tokens, _, _ in beams:
            row = log_probs([*prompt, *tokens])
            best = np.argsort(-row, kind="stable")[: engine.num_candidates]
            candidates.append(([int(t) for t in best], [float(row[t]) for t in best]))
        beams = [
            ([*beams[c.parent][0], c.token_id], [*beams[c.parent][1], c.logprob], c.sum_logprobs)
            for c in engine.advance(beams, candidates)
        ]
        steps += 1
    return [(list(h.token_ids), h.sum_logprobs, h.score) for h in engine.finished], steps


def random_model(seed, vocab):
    """A Markov model of random log-probabilities."""
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(vocab, vocab)) * 2
    table -= np.log(np.exp(table).sum(1, keepdims=True))
    return lambda tokens: table[tokens[-1]] + 0.0 * len(tokens)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_equals_a_search_over_the_whole_vocabulary(width, length_penalty, early_stopping):
    """B37: tokens and sums as a plain reference, vocabulary of 8, one to three stop tokens, any limit."""
    for seed in range(25):
        rng = random.Random(seed)
        model, stops, limit = random_model(seed, 8), set(rng.sample(range(8), rng.randint(1, 3))), rng.randint(1, 7)
        params = beam_params(width, limit, length_penalty=length_penalty, early_stopping=early_stopping)
        got, _ = search([3], model, params, stops, limit)
        want = beam_reference(
            [3], width=width, max_tokens=limit, stop_ids=stops, length_penalty=length_penalty,
            early_stopping=early_stopping, log_probs=model,
        )  # fmt: skip
        assert [tokens for tokens, _, _ in got] == [tokens for tokens, _, _ in want]
        np.testing.assert_allclose([g[1:] for g in got], [w[1:] for w in want], atol=1e-9)


def test_candidates_are_enough_even_if_every_stop_token_is_likely():
    assert [num_candidates(4, 1), num_candidates(4, 0), num_candidates(1, 3), num_candidates(2, 5)] == [8, 8, 4, 7]


def test_width_one_without_stops_is_greedy():
    model = random_model(4, 8)
    got, _ = search([1], model, beam_params(1, 6), (), 6)
    tokens = [1]
    for _ in range(6):
        tokens.append(int(model(tokens).argmax()))
    assert got[0][0] == tokens[1:]


def test_early_stopping_takes_no_more_steps_than_the_others():
    """True ends at the first ``beam_width`` hypotheses; "never" goes on as long as any beam could still win."""
    params = {mode: beam_params(2, 30, early_stopping=mode, length_penalty=1.0) for mode in (True, False, "never")}
    steps = {mode: sum(search([2], random_model(seed, 6), p, {0}, 30)[1] for seed in range(30)) for mode, p in params.items()}
    assert steps[True] <= steps[False] < steps["never"]


@pytest.fixture(scope="module")
def tiny_llama():
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=24,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    model.eval()

    @functools.cache
    def log_probs(tokens):
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1).numpy().astype(np.float64)

    return torch, model, lambda tokens: log_probs(tuple(tokens))


@pytest.mark.parametrize(
    "width, length_penalty, eos, early_stopping",
    [
        (1, 1.0, [5], False),
        (2, 1.0, [5], True),
        (4, 0.0, [5], "never"),
        (3, 2.0, [5, 9], False),
        (3, 2.0, [5, 9], "never"),
        (6, -0.5, [1], True),
        (6, 0.5, [1], False),
    ],
)
def test_equals_transformers(tiny_llama, width, length_penalty, eos, early_stopping):
    """Same model, same float32 logits: sequences, order and scores of ``generate(num_beams=...)``."""
    torch, model, log_probs = tiny_llama
    for prompt in ([3, 4, 7], [11, 2]):
        out = model.generate(
            torch.tensor([prompt]), num_beams=width, num_return_sequences=width, max_new_tokens=9, do_sample=False,
            eos_token_id=eos, pad_token_id=23, length_penalty=length_penalty, early_stopping=early_stopping,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        params = beam_params(width, 9, length_penalty=length_penalty, early_stopping=early_stopping)
        got, _ = search(prompt, log_probs, params, eos, 9)
        for row, score, (tokens, _, mine) in zip(
            out.sequences.tolist(), getattr(out, "sequences_scores", [None] * width), got, strict=True
        ):
            assert [*prompt, *tokens] == row[: len(prompt) + len(tokens)]
            assert all(token == 23 for token in row[len(prompt) + len(tokens) :])
            if width > 1:
                assert float(score) == pytest.approx(mine, abs=1e-4)


# --- pages -------------------------------------------------------------------------------------------------------------


def tables(harness, req):
    return [harness.table(req, index) for index in range(len(req.sequences))]


def test_beams_share_and_drop_pages():
    """R11, B37: forks name their parent's pages, dropped beams give them back, only a shared last page is copied."""
    harness = Harness(num_pages=40)
    req = harness.add(request("a", 6, beam_params(3, 8, ignore_eos=True)))
    output = harness.step()
    assert len(output.samples) == 1 and len(req.sequences) == 3
    assert tables(harness, req) == [[1, 2]] * 3
    assert harness.scheduler._kv.pool.ref_cnt[1:3] == [3, 3]
    output = harness.step()
    assert output.copies == ((2, 3), (2, 4))
    for _ in range(5):
        parents = {tuple(seq.token_ids) for seq in req.sequences}
        harness.step()
        for seq in req.sequences:  # every table is that of a parent: the prefix is a beam of the step before
            assert any(tuple(seq.token_ids[: len(p)]) == p for p in parents)
        assert all(table[0] == 1 for table in tables(harness, req))
    harness.run()
    want = beam_reference(req.prompt_token_ids, width=3, max_tokens=8, stop_ids=())
    assert [seq.generated_token_ids for seq in req.sequences] == [tokens for tokens, _, _ in want]
    assert [seq.cumulative_logprob for seq in req.sequences] == pytest.approx([total for _, total, _ in want])
    assert [seq.index for seq in req.sequences] == [0, 1, 2]
    assert {seq.finish_reason for seq in req.sequences} == {FinishReason.LENGTH}


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_beams_survive_pressure(mode, pipelined):
    """Preempted, swapped and resumed in any mix, the hypotheses are those of an unpressured search; each score is the sum
    of its own log-probabilities."""
    harness = Harness(num_pages=9, num_host_pages=6, preemption_mode=mode, pipelined=pipelined, max_num_seqs=6)
    reqs = [
        harness.add(request(f"r{i}", [1 + i, 2, 3, 4 + i, 5], beam_params(1 + i % 3, 7), eos={EOS} if i % 2 else ()))
        for i in range(6)
    ]
    harness.run()
    assert harness.scheduler.stats().num_preemptions > 0
    for req in reqs:
        want = beam_reference(req.prompt_token_ids, width=req.params.beam_width, max_tokens=7, stop_ids=req.eos_token_ids)
        assert [seq.generated_token_ids for seq in req.sequences] == [tokens for tokens, _, _ in want]
        for seq in req.sequences:
            assert sum(logprob for logprob, _ in seq.logprobs) == pytest.approx(seq.cumulative_logprob)


def test_beams_are_not_run_ahead():
    """The host decides which beams go on; meanwhile they have no row, others do."""
    harness = Harness(pipelined=True, num_pages=30)
    beam = harness.add(request("beam", 5, beam_params(2, 4, ignore_eos=True)))
    other = harness.add(request("other", 5))
    harness.dispatch()
    output = harness.dispatch()
    assert [row.seq_id for row in output.scheduled] == [other.sequences[0].seq_id]
    harness.run()
    assert beam.finished and len(beam.sequences) == 2


def test_aborting_beams_gives_everything_back():
    for steps in range(5):
        harness = Harness(pipelined=steps % 2 == 1)
        req = harness.add(request("a", 5, beam_params(3, 6)))
        for _ in range(steps):
            harness.step()
        harness.scheduler.abort("a")
        assert all(seq.finish_reason is FinishReason.ABORT for seq in req.sequences)
        harness.run()


def test_beams_that_lost_a_seat_do_not_wait_forever():
    """With ten of twelve tokens ending a hypothesis the first step leaves two beams of three, and another request takes the
    third seat. When there are three beams again, one is queued and the others wait for it; the lower-ranked request, which
    finds no page, gives way."""
    harness = Harness(page_size=1, num_pages=13, max_num_seqs=3, enable_prefix_caching=False)
    eos = frozenset(range(2, 12))
    req = harness.add(request("beam", [1, 6], beam_params(3, 4), eos=eos))
    low = harness.add(request("low", [1, 2, 3], SamplingParams(max_tokens=9)))
    harness.run(max_steps=60)
    assert [output.preempted for output in harness.outputs if output.preempted] == [(low.sequences[0].seq_id,)]
    want = beam_reference(req.prompt_token_ids, width=3, max_tokens=4, stop_ids=eos)
    assert [seq.generated_token_ids for seq in req.sequences] == [tokens for tokens, _, _ in want]
    expect_lone(low)

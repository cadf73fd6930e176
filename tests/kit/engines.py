"""Engines for tests: one per configuration and session, run to the end with a step limit, checked at rest.

Compiling is what tests wait for, so engines made here have one decode bucket unless asked for the whole ladder, and two
engines whose steps are the same program share the jitted function.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from jaxpaged.config import EngineConfig
from jaxpaged.engine import engine as engine_module
from jaxpaged.engine.buckets import BucketConfig, Buckets
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.model_runner import ModelRunner
from jaxpaged.outputs import RequestOutput
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams

SMALL: dict[str, Any] = {
    "dtype": "float32", "page_size": 4, "num_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64,
    "debug": True,
}  # fmt: skip
Params = SamplingParams | BeamSearchParams
_numbers = iter(range(10**9))


_programs: dict[tuple[Any, ...], Callable] = {}


def _shared_program(runner: ModelRunner, original: Callable, shape: Any, why: str) -> Callable:
    model = runner._model
    key = (
        model.graphdef, model.treedef, runner._backend, runner.spec, runner._program.valid_vocab, runner._last_tokens.shape,
        tuple((leaf.shape, leaf.dtype) for leaf in model.leaves), shape,
    )  # fmt: skip
    if key not in _programs:
        _programs[key] = original(runner, shape, why)
    return _programs[key]


def _few_buckets(config: BucketConfig) -> Buckets:
    return Buckets(dataclasses.replace(config, min_tokens=config.max_num_seqs))


def fresh_engine(model: str | Path, *, few_buckets: bool = True, **options: Any) -> Engine:
    """A new engine with ``SMALL`` options overridden by ``options``; ``few_buckets=False`` makes it exactly as users do."""
    config = EngineConfig.from_dict({"model": str(model), **SMALL, **options})
    if not few_buckets:
        return Engine(config)
    share = functools.partialmethod(_shared_program, ModelRunner._compile)
    with (
        mock.patch.object(engine_module, "Buckets", _few_buckets),
        mock.patch.object(ModelRunner, "_compile", share),
    ):
        return Engine(config)


@functools.cache
def _shared(model: str, options: tuple[tuple[str, Any], ...]) -> Engine:
    return fresh_engine(model, **dict(options))


def engine_for(model: str | Path, **options: Any) -> Engine:
    """The session's engine of these options, at rest. Its prefix cache keeps what earlier tests left: use salts."""
    engine = _shared(str(model), tuple(sorted(options.items())))
    check_rest(engine)
    return engine


def salt() -> str:
    """A cache salt no other request has."""
    return f"salt-{next(_numbers)}"


def greedy(max_tokens: int = 16, **fields: Any) -> SamplingParams:
    """Greedy, EOS ignored, with the sampled tokens' log-probabilities."""
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0} | fields))


def add(engine: Engine, prompt: Any, params: Params, **options: Any) -> str:
    """Queues a request under a new id, which is returned; a list of ints is a prompt's token ids."""
    request_id = f"test-{next(_numbers)}"
    engine.add_request(request_id, {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt, params, **options)
    return request_id


def finish(engine: Engine, max_steps: int = 5000) -> dict[str, RequestOutput]:
    """Steps until nothing is left; the final output of each request, by id. The engine is then at rest."""
    done: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            check_rest(engine)
            return done
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done, "a request was reported finished twice"
                done[output.request_id] = output
    raise AssertionError(f"the engine has not finished after {max_steps} steps: {engine.stats()}")


def run(
    engine: Engine, prompts: Sequence[Any], params: Params | Sequence[Params], *, cache_salt: str = "", max_steps: int = 5000
) -> list[RequestOutput]:
    """Runs prompts together to the end, in order."""
    each = [params] * len(prompts) if isinstance(params, (SamplingParams, BeamSearchParams)) else params
    ids = [add(engine, prompt, own, cache_salt=cache_salt) for prompt, own in zip(prompts, each, strict=True)]
    done = finish(engine, max_steps)
    return [done[request_id] for request_id in ids]


def tokens(output: RequestOutput, index: int = 0) -> list[int]:
    """The token ids of one completion."""
    return output.outputs[index].token_ids


def logprobs(output: RequestOutput, index: int = 0) -> list[float]:
    """The log-probabilities of one completion's own tokens."""
    completion = output.outputs[index]
    assert completion.logprobs is not None
    return [row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]


def check_rest(engine: Engine) -> None:
    """Nothing is left behind: no request, reference, row, text or entry; all pages free or cached; all books agree."""
    assert not engine.has_unfinished_requests()
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.num_running_seqs, stats.num_waiting_seqs, stats.num_swapped_seqs) == (0, 0, 0)
    assert stats.num_used_pages == stats.num_logical_pages == 0
    assert not any(engine._scheduler._kv.pool.ref_cnt), "a page is still referenced"
    assert stats.num_cached_pages <= stats.num_pages
    assert engine._builder.seq_ids == [], "a sequence still has an input row"
    assert not engine._prompts and not engine._final_only and not engine._outputs._detokenizer._streams

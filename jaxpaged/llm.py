"""``LLM``: prompts in, completions out. The shape of the class follows vLLM's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.errors import InvalidRequestError
from jaxpaged.outputs import RequestOutput
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.weights.tokenizer import Tokenizer

Params = SamplingParams | BeamSearchParams


class LLM:
    """A model ready to generate.

    Example:
        >>> llm = LLM("path/to/model", max_num_seqs=32)
        >>> llm.generate(["Once upon a time"], SamplingParams(max_tokens=20))[0].outputs[0].text

    Args:
        model: a Hugging Face directory, a ``.gguf`` file, an Orbax checkpoint directory or a hub id.
        use_tqdm: show progress bars while loading and compiling.
        **engine_options: fields of ``EngineConfig``: ``dtype``, ``kv_cache_dtype``, ``page_size``, ``num_pages``,
            ``memory_fraction``, ``max_model_len``, ``max_num_seqs``, ``max_num_batched_tokens``, ``enable_prefix_caching``,
            ``seed``, ``implementation``, ...

    Attributes:
        engine: the engine, for step-by-step use.

    Raises:
        ConfigError: an option is unknown or wrong; the message names it.
        CheckpointError: the model cannot be loaded.
    """

    def __init__(self, model: str, *, use_tqdm: bool = False, **engine_options: Any):
        config = EngineConfig.from_dict({"model": str(model), **engine_options}, where="LLM")
        self.engine = Engine(config, progress=use_tqdm)
        self._count = 0

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None where it has none."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Any,
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts.

        Args:
            prompts: one prompt or a list of them; a prompt is text, token ids (a list or
                an array), ``{"prompt_token_ids": [...]}``, ``{"prompt": ...}`` or ``{"messages": [...]}``.
            sampling_params: one for all (each prompt is still an independent request) or one per prompt; None takes the
                defaults. Prompts that share one seeded object draw the same noise.
            use_tqdm: show a progress bar on standard error.

        Returns:
            One output per prompt, in the order given.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; the message names which. Nothing runs then.
            CapacityError: a prompt could never fit into the pool.
        """
        if isinstance(prompts, (str, Mapping)):
            prompts = [prompts]
        if not isinstance(prompts, Iterable):
            raise InvalidRequestError(f"prompts: got {type(prompts).__name__}, wants a prompt or a list of them")
        return self._run(list(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers conversations through the model's chat template.

        Args:
            messages: one conversation (a list of ``{"role", "content"}``) or a list of conversations.
            sampling_params: as in ``generate``.
            use_tqdm: show a progress bar on standard error.

        Returns:
            One output per conversation, in the order given.

        Raises:
            InvalidRequestError: a message or parameter is wrong.
            ConfigError: the model has no chat template.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
            raise InvalidRequestError("messages: wants a non-empty list of {role, content}, or a list of such lists")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        return self._run([{"messages": conversation} for conversation in conversations], sampling_params, use_tqdm)

    def beam_search(self, prompts: Any, params: BeamSearchParams, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Beam search over each prompt; ``outputs`` are the hypotheses, best first. Errors as in ``generate``."""
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def _run(self, prompts: list[Any], params: Params | Sequence[Params] | None, use_tqdm: bool) -> list[RequestOutput]:
        if params is None:
            params = SamplingParams()
        if not isinstance(params, (SamplingParams, BeamSearchParams, Sequence)):
            raise InvalidRequestError(
                f"sampling_params: got {type(params).__name__}, wants SamplingParams, BeamSearchParams or a list of them"
            )
        each = [params] * len(prompts) if isinstance(params, (SamplingParams, BeamSearchParams)) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequestError(f"sampling_params: got {len(each)}, wants 1 or {len(prompts)} like prompts")
        ids: list[str] = []
        try:
            for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
                request_id = f"generate-{self._count}"
                self._count += 1
                try:
                    self.engine.add_request(request_id, prompt, own, final_only=True)
                except InvalidRequestError as error:
                    if len(prompts) == 1:
                        raise
                    raise InvalidRequestError(f"prompt {index}: {error}") from None
                ids.append(request_id)
            return self._drain(ids, use_tqdm)
        except BaseException:
            for request_id in ids:
                self.engine.abort_request(request_id)
            raise

    def _drain(self, ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        tokens = 0
        with tqdm(total=len(ids), desc="prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while len(done) < len(ids):
                for output in self.engine.step():
                    if output.finished:
                        done[output.request_id] = output
                        tokens += sum(len(o.token_ids) for o in output.outputs)
                        bar.update(1)
                        rate = tokens / max(bar.format_dict["elapsed"], 1e-9)
                        bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
        return [done[request_id] for request_id in ids]

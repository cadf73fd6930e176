"""From sequences to what callers see: texts, log-probabilities, finish reasons, the best ``n`` of ``best_of``."""

from collections.abc import Iterable

from jaxpaged.engine.detokenizer import Detokenizer
from jaxpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jaxpaged.request import FinishReason, Request, Sequence
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.weights.tokenizer import Tokenizer

NON_FINITE = "the model's logits were not finite (NaN or infinity)"


class OutputBuilder:
    """Builds ``RequestOutput``.

    Args:
        tokenizer: of the model, or None.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)

    def build(self, request: Request, prompt: str | None) -> RequestOutput:
        """The request's present state.

        Args:
            request: running or finished.
            prompt: its text, where it was given as text.
        """
        finished = request.finished
        sequences = self._chosen(request) if finished else request.sequences
        outputs = [self._completion(seq, index) for index, seq in enumerate(sequences)]
        failed = any(seq.finish_reason is FinishReason.ERROR for seq in request.sequences)
        if finished:
            for seq in request.sequences:
                self._detokenizer.forget(seq.seq_id)
        return RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=outputs,
            finished=finished,
            num_cached_tokens=request.sequences[0].num_cached_tokens if request.sequences else 0,
            error=NON_FINITE if failed else None,
        )

    @property
    def seq_ids(self) -> list[int]:
        """Sequences whose growing text is kept."""
        return self._detokenizer.seq_ids

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drops the growing text of sequences that are gone."""
        for seq_id in seq_ids:
            self._detokenizer.forget(seq_id)

    @staticmethod
    def _chosen(request: Request) -> list[Sequence]:
        params = request.params
        if isinstance(params, BeamSearchParams) or params.num_samples == params.n:
            return request.sequences
        ranked = sorted(request.sequences, key=lambda seq: (-seq.cumulative_logprob, seq.index))
        return ranked[: params.n]

    def _completion(self, seq: Sequence, index: int) -> CompletionOutput:
        params = seq.request.params
        ids = seq.generated_token_ids
        stopped = seq.finish_reason is FinishReason.STOP
        skip = params.skip_special_tokens
        if seq.finished:
            text = self._detokenizer.final_text(ids[:-1] if stopped else ids, skip_special_tokens=skip)
        else:
            text = self._detokenizer.growing_text(seq.seq_id, ids, skip_special_tokens=skip)
        wanted = isinstance(params, SamplingParams) and params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=ids,
            cumulative_logprob=seq.cumulative_logprob if wanted or isinstance(params, BeamSearchParams) else None,
            logprobs=self._logprobs(seq, ids) if wanted else None,
            finish_reason=None if seq.finish_reason is None else seq.finish_reason.value,
            stop_reason=seq.stop_reason,
        )

    def _logprobs(self, seq: Sequence, ids: list[int]) -> list[dict[int, Logprob]]:
        def entry(token: int, value: float, rank: int | None) -> Logprob:
            return Logprob(value, rank, self._tokenizer.decode([token], skip_special_tokens=False) if self._tokenizer else None)

        rows = []
        for token, (value, top) in zip(ids, seq.logprobs, strict=False):
            row = {other: entry(other, logprob, rank) for rank, (other, logprob) in enumerate(top, 1)}
            if token not in row:
                row[token] = entry(token, value, None)
            rows.append(row)
        return rows

"""Beam search over a whole vocabulary with plain arrays, written from the documented behaviour of ``transformers``.

It keeps no page, forks nothing and looks at every token of every beam: the truth for the scheduler's beam search.
"""

import numpy as np

from tests.host.fakes import chains, logits


def beam_reference(prompt, *, width, max_tokens, stop_ids, length_penalty=1.0, early_stopping=False, log_probs=None):
    """Returns ``[(generated tokens, sum of log-probabilities, score)]``, best first.

    Args:
        log_probs: maps a token list to the next token's log-probabilities ``[V]``; None uses the fake device's.
    """
    log_probs = log_probs or (lambda tokens: np.array(logits(chains(tokens)[-1])))
    running = [(list(prompt), 0.0)]
    finished: list[tuple[list[int], float, float]] = []
    for length in range(1, max_tokens + 1):
        rows = np.stack([log_probs(tokens) + total for tokens, total in running])
        vocab = rows.shape[1]
        order = np.argsort(-rows.reshape(-1), kind="stable")
        candidates = [(int(i) // vocab, int(i) % vocab, float(rows.reshape(-1)[i])) for i in order]
        stops = [token in stop_ids or length == max_tokens for _, token, _ in candidates]
        for (beam, token, total), stop in list(zip(candidates, stops, strict=True))[:width]:
            if stop:
                finished.append(([*running[beam][0], token], total, total / length**length_penalty))
        finished = sorted(finished, key=lambda f: -f[2])[:width]
        open_ = [c for c, stop in zip(candidates, stops, strict=True) if not stop][:width]
        if not open_:
            break
        running = [([*running[beam][0], token], total) for beam, token, total in open_]
        if len(finished) == width:
            best_length = max_tokens if early_stopping == "never" and length_penalty > 0 else length
            if early_stopping is True or running[0][1] / best_length**length_penalty <= finished[-1][2]:
                break
    return [(tokens[len(prompt) :], total, score) for tokens, total, score in finished]

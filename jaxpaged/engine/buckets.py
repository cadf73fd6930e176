"""The short list of static shapes a step is compiled for, and the choice among them.

A step is either *decode* (one token a row: token and row counts are one bucket) or *mixed* (a token bucket at the full row
count). The page axis needs no buckets: kernels stop at the longest live row.
"""

import dataclasses

from jaxpaged.model.inputs import StepShape
from jaxpaged.model.kv_pages import PlanShape


@dataclasses.dataclass(frozen=True)
class BucketConfig:
    """What the bucket list follows from.

    Args:
        max_num_seqs: most rows of a step, and most samples.
        max_num_batched_tokens: most query tokens of a step.
        max_pages: pages of the longest sequence.
        min_tokens: smallest decode bucket (a matrix product of one row is slow on some backends).
        mixed_growth: ratio of neighbouring token buckets of mixed steps.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_pages: int
    min_tokens: int = 1
    mixed_growth: int = 4


def _ladder(low: int, high: int, growth: int) -> list[int]:
    sizes = []
    while low < high:
        sizes.append(low)
        low *= growth
    return [*sizes, high]


class Buckets:
    """The buckets of one engine.

    Attributes:
        decode, mixed: shapes, smallest first.
    """

    def __init__(self, config: BucketConfig):
        rows = config.max_num_seqs
        low = min(config.min_tokens, rows)
        self.decode = [
            StepShape(PlanShape(size, size, config.max_pages, decode_only=True), size)
            for size in _ladder(low, max(rows, config.min_tokens), 2)
        ]
        budget = max(config.max_num_batched_tokens, config.min_tokens, 2)
        self.mixed = [
            StepShape(PlanShape(size, rows, config.max_pages), rows)
            for size in _ladder(min(16, budget), budget, config.mixed_growth)
        ]

    def __iter__(self):
        return iter([*self.decode, *self.mixed])

    def __len__(self) -> int:
        return len(self.decode) + len(self.mixed)

    def choose(self, num_tokens: int, num_rows: int, num_samples: int) -> StepShape:
        """The smallest bucket that holds a step.

        Args:
            num_tokens: query tokens; equal to ``num_rows`` where every row has one.
            num_rows: sequences.
            num_samples: sample rows.
        """
        if num_tokens == num_rows:
            need = max(num_rows, num_samples)
            return next(shape for shape in self.decode if shape.plan.num_seqs >= need)
        return next(shape for shape in self.mixed if shape.plan.num_tokens >= num_tokens)

    def table(self) -> str:
        """One line a bucket."""
        return "\n".join(str(shape) for shape in self)

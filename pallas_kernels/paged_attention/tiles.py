"""Tile sizes an attention or write kernel may be told to use."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of a kernel's chunks of work; None takes the implementation's default for the pool at hand.

    Split length and query tile are not here: they belong to the plan, which every implementation shares.

    Attributes:
        kv_tile: kv tokens one inner step computes on (all implementations).
        fetch_tile: kv tokens one group of copies brings in, a multiple of ``kv_tile`` ("mosaic_tpu").
        num_warps: warps of a program ("triton").
        num_stages: software pipeline depth of the inner loop ("triton").
        vmem_limit_bytes: what the kernel may use of VMEM ("mosaic_tpu").
    """

    kv_tile: int | None = None
    fetch_tile: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    vmem_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"tiles.{field.name}: got {value!r}, wants an integer >= 1 or None")

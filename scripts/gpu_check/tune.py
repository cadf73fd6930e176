"""A search over tiles, warps and stages; what wins becomes the device's tuning table."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from pallas_kernels import triton_call
from pallas_kernels.paged_attention.triton_tiles import TritonTiles, default_tiles, device_slug, tuning_key
from scripts.gpu_check.clock import Box, Sizes, median_seconds, reason
from scripts.gpu_check.workload import Point, Work, layered, make

GAIN = 0.98  # a setting has to be at least 2 % faster to replace the one before

DECODE: dict[str, tuple[int, ...]] = {
    "decode_tokens": (32, 64, 128),
    "decode_warps": (2, 4, 8),
    "decode_stages": (2, 3, 4),
    "combine_splits": (4, 16),
    "decode_rows": (16, 64),
}
RAGGED: dict[str, tuple[int, ...]] = {
    "ragged_rows": (64, 128),
    "ragged_tokens": (32, 64, 128),
    "ragged_warps": (4, 8),
    "ragged_stages": (2, 3),
}
SPLITS = (256, 512, 1024, 2048)


def formats(sizes: Sizes) -> list[tuple[list[Point], dict[str, tuple[int, ...]]]]:
    """What to tune, in order: points that are timed together, and the axes to search."""
    if sizes.smoke:
        tiny = {"dtype": "bfloat16", "heads": (4, 2), "head_dim": 32, "split_len": 16}
        return [([Point(2, 24, **tiny)], {"decode_tokens": (32,)})]
    rounds = []
    for dtype in ("bfloat16", "float8_e4m3fn", "int8"):
        rounds.append(([Point(64, 2048, dtype=dtype), Point(8, 16384, dtype=dtype)], DECODE))
    for dtype in ("bfloat16", "int8"):
        rounds.append(([Point(1, 2048, 2048, dtype=dtype), Point(4, 4096, 512, dtype=dtype)], RAGGED))
    return rounds


def measure(works: list[Work], tiles: TritonTiles, sizes: Sizes) -> float:
    """Geometric mean of the points' seconds an attention call."""
    logs = []
    for work in works:
        program, args, steps = layered(work, "triton", sizes.interpret, tiles=tiles)
        logs.append(math.log(median_seconds(program, args, max(3, sizes.repeats // 3)) / steps))
    return math.exp(sum(logs) / len(logs))


def result_of(work: Work, tiles: TritonTiles, sizes: Sizes) -> np.ndarray:
    """Output after one attention call, to see that a setting computes the same."""
    program, args, _ = layered(work, "triton", sizes.interpret, tiles=tiles, steps=1)
    return np.asarray(program(*args)).astype(np.float32)


def search(points: list[Point], axes: dict[str, tuple[int, ...]], start: TritonTiles, sizes: Sizes, box: Box):
    """Coordinate descent: one axis after the other, each at its best so far.

    Returns:
        ``(best settings, their seconds, log of every trial)``.
    """
    works = [make(point, sizes) for point in points]
    best, trials = start, []
    best_seconds = measure(works, start, sizes)
    trials.append({"tiles": dataclasses.asdict(start), "us": best_seconds * 1e6})
    want = result_of(works[0], start, sizes)
    for axis, values in axes.items():
        for value in values:
            if value == getattr(best, axis) or not box.left:
                continue
            tiles = dataclasses.replace(best, **{axis: value})
            trial: dict[str, Any] = {"changed": f"{axis}={value}"}
            try:
                got = result_of(works[0], tiles, sizes)
                if not np.allclose(got, want, rtol=0.02, atol=0.02):
                    raise ArithmeticError(f"the result differs by {np.abs(got - want).max():.3g}")
                seconds = measure(works, tiles, sizes)
                trial["us"] = seconds * 1e6
                if seconds < GAIN * best_seconds:
                    best, best_seconds = tiles, seconds
                    trial["taken"] = True
            except Exception as problem:  # too much shared memory, too many registers
                trial["problem"] = reason(problem)
            trials.append(trial)
    return best, best_seconds, trials


def split_lengths(sizes: Sizes, box: Box) -> list[dict[str, Any]]:
    """Decode time by split length; the plan's maker chooses it, so this is advice and not part of the table."""
    if sizes.smoke:
        points, splits = [Point(1, 48, heads=(4, 2), head_dim=32)], (16,)
    else:
        points, splits = [Point(1, 32768), Point(8, 2048), Point(64, 2048), Point(64, 2048, heads=(9, 3), head_dim=64)], SPLITS
    rows = []
    for point in points:
        for split in splits:
            if not box.left:
                return rows
            work = make(dataclasses.replace(point, split_len=split), sizes)
            program, args, steps = layered(work, "triton", sizes.interpret)
            rows.append(
                {"point": point.id, "split_len": split, "us": median_seconds(program, args, sizes.repeats) / steps * 1e6}
            )
    return rows


def run(sizes: Sizes, box: Box) -> dict[str, Any]:
    """Searches every format that the time box has room for.

    Returns:
        ``{"device", "file", "tiles": {tuning_key: changed fields}, "trials", "split_lengths"}``.
    """
    kind = jax.devices()[0].device_kind
    capability = triton_call.compute_capability(kind)
    tables: dict[str, dict[str, int]] = {}
    trials: dict[str, Any] = {}
    lengths = split_lengths(sizes, Box(box.left * 0.25))
    for points, axes in formats(sizes):
        spec = make(points[0], dataclasses.replace(sizes, flush_bytes=1)).pool.spec
        key = tuning_key(spec)
        name = f"{key} {'decode' if points[0].query == 1 else 'prefill'}"
        if not box.left:
            trials[name] = "left out: the section's time is over"
            continue
        default = default_tiles(spec, capability)
        start = dataclasses.replace(default, **tables.get(key, {}))
        try:
            best, _, trials[name] = search(points, axes, start, sizes, box)
        except Exception as problem:
            trials[name] = reason(problem)
            continue
        changed = {
            f.name: getattr(best, f.name) for f in dataclasses.fields(best) if getattr(best, f.name) != getattr(default, f.name)
        }
        if changed:
            tables[key] = changed
    return {"device": kind, "file": f"{device_slug(kind)}.json", "tiles": tables, "trials": trials, "split_lengths": lengths}

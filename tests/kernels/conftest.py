"""The long tail of the kernel battery is a grid of several hundred compiled programs: an hour of work.

CI runs an eighth of it, always the same one (chosen by a checksum of the test's name); the rest carries the marker ``grid`` and
runs with ``scripts/test.sh --grid``.
"""

import zlib
from pathlib import Path

import pytest

SAMPLE = 8
WHOLE = {"test_triton_check_script.py"}
NEVER = {"test_every_kernel_and_step_is_within_budget"}  # the whole compile matrix; CI runs the quick set


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks seven eighths of this folder's long tests ``grid``."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent != here or item.path.name in WHOLE or item.get_closest_marker("long") is None:
            continue
        if item.name in NEVER or zlib.crc32(item.nodeid.encode()) % SAMPLE:
            item.add_marker(pytest.mark.grid)

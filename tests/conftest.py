"""Shared set-up: how tests compile, and the small models they share.

Environment variables are set before JAX is first imported; host tests never import it.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

_CACHE = "JAX_COMPILATION_CACHE_DIR"


def pytest_configure(config: pytest.Config) -> None:
    """One compilation cache for the session, thrown away at its end unless the caller names one.

    The default run compiles without LLVM's optimisation, which halves its time; a run that includes the long tests compiles
    as users do.
    """
    if _CACHE not in os.environ:
        config._jaxpaged_cache = os.environ[_CACHE] = tempfile.mkdtemp(prefix="jaxpaged-tests-")  # type: ignore[attr-defined]
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    if config.option.markexpr == "not long":
        quick = "--xla_backend_optimization_level=0"
        flags = os.environ.get("XLA_FLAGS", "")
        if quick not in flags:
            os.environ["XLA_FLAGS"] = f"{quick} {flags}".strip()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the session's compilation cache."""
    directory = getattr(config, "_jaxpaged_cache", None)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
        os.environ.pop(_CACHE, None)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY (see ``tests.kit.tiny``)."""
    from tests.kit.tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_oracle(tiny_dir: Path):
    """The dense oracle of TINY."""
    from tests.kit.oracle import Oracle

    return Oracle(tiny_dir)

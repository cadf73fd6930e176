"""``jaxpaged info``: what this machine would run on."""

import argparse
import platform
from importlib import metadata
from typing import Any

from jaxpaged.commands.exit_codes import EXIT_OK

PACKAGES = ("jaxpaged", "jax", "jaxlib", "flax", "transformers", "orbax-checkpoint", "gguf", "tokenizers", "safetensors")


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parser."""
    parser = commands.add_parser(
        "info",
        help="platform, devices, versions and kernels",
        description="Shows the platform, its devices and memory, the versions in use, and which kernels would run.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    import jax  # these only when needed: they take seconds

    from pallas_kernels.dispatch import BY_PLATFORM, NO_KERNEL, OPS

    rows = [
        ("python", platform.python_version()),
        ("platform", f"{jax.default_backend()} ({platform.machine()}, {platform.system()})"),
    ]
    for device in jax.devices():
        rows.append(("device", f"{device.id}: {device.device_kind}{_memory(device)}"))
    own = BY_PLATFORM.get(jax.default_backend(), "xla")
    rows += [("kernel", f"{op}: {NO_KERNEL.get((op, own), own)}") for op in OPS]
    rows += [("package", f"{name} {_version(name)}") for name in PACKAGES]
    print("\n".join(f"{name + ':':<12}{value}" for name, value in rows))
    return EXIT_OK


def _memory(device: Any) -> str:
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return f", {limit / 2**30:.1f} GiB" if limit else ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"

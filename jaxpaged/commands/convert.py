"""``jaxpaged convert``: any readable checkpoint into an Orbax one."""

import argparse
import os
from typing import Any

from jaxpaged.commands.exit_codes import EXIT_OK
from jaxpaged.config import DTYPES
from jaxpaged.errors import ConfigError

EPILOG = """\
examples:
  jaxpaged convert ./Llama-3.1-8B-Instruct ./llama-orbax
  jaxpaged convert model.gguf ./model-orbax --dtype bfloat16

An Orbax checkpoint is restored straight to the devices it is meant for, each reading only its part.
"""


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parser."""
    parser = commands.add_parser(
        "convert",
        help="write a checkpoint in Orbax form",
        description="Reads SRC (a Hugging Face directory or hub id, a .gguf file) and writes an Orbax checkpoint to DST.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("src", metavar="SRC", help="the checkpoint to read")
    parser.add_argument("dst", metavar="DST", help="the directory to write; must not exist, or be empty")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the written weights; auto keeps the source's own")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    if os.path.exists(args.dst) and (not os.path.isdir(args.dst) or os.listdir(args.dst)):
        raise ConfigError(f"DST: {args.dst!r} exists and is not an empty directory; choose another path")
    from jaxpaged.weights.orbax_io import convert_checkpoint  # loads JAX: only when needed

    convert_checkpoint(args.src, args.dst, dtype=args.dtype)
    print(f"wrote {args.dst}")
    return EXIT_OK

"""``jaxpaged convert``: any readable checkpoint into an Orbax one."""

import argparse
import sys
from typing import Any

from jaxpaged.commands.exit_codes import EXIT_OK
from jaxpaged.config import DTYPES

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
        allow_abbrev=False,
    )
    parser.add_argument("src", metavar="SRC", help="the checkpoint to read")
    parser.add_argument("dst", metavar="DST", help="the directory to write; must not exist, or be empty")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the written weights; auto keeps the source's own")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    from jaxpaged.weights.checkpoint import open_checkpoint  # these load JAX: only when needed
    from jaxpaged.weights.orbax_io import save_orbax

    dtype = None if args.dtype == "auto" else args.dtype
    written = save_orbax(open_checkpoint(args.src, revision=args.revision), args.dst, dtype=dtype, progress=sys.stderr.isatty())
    print(f"wrote {written}")
    return EXIT_OK

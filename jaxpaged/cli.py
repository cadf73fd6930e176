"""The ``jaxpaged`` command."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from jaxpaged.batch.signals import Interrupted
from jaxpaged.commands import convert, events, generate, info
from jaxpaged.commands.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_SIGNAL_BASE, EXIT_USAGE
from jaxpaged.errors import ConfigError, InvalidRequestError, InvariantError, JaxPagedError

EPILOG = """\
examples:
  jaxpaged generate --config job.yaml          run a file of prompts; can be killed and resumed
  jaxpaged generate --model M --prompt "..."   one prompt, streamed
  jaxpaged convert SRC DST                     write an Orbax checkpoint
  jaxpaged events check LOG                    check a page-event log
  jaxpaged info                                devices, versions, kernels

Each command explains itself: jaxpaged COMMAND --help.
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="jaxpaged",
        description="PagedAttention inference for the Llama family on TPU, GPU and CPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jaxpaged {metadata.version('jaxpaged')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (generate, convert, events, info):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        argv: the arguments after the program's name; ``sys.argv`` by default.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong usage or config, 3 a job with error records, 130 or 143 stopped by a signal.
        Errors a user can mend are one line on stderr; a bug of jaxpaged keeps its traceback.
    """
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except InvariantError:
        raise
    except (ConfigError, InvalidRequestError) as error:
        return _fail(error, EXIT_USAGE)
    except JaxPagedError as error:
        return _fail(error, EXIT_FAILED)
    except Interrupted as stop:
        return EXIT_SIGNAL_BASE + stop.signum
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_SIGNAL_BASE + 2
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except MemoryError:
        return _fail("out of memory; lower memory_fraction, num_pages or max_num_seqs", EXIT_FAILED)


def _fail(error: Exception | str, code: int) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

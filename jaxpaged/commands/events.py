"""``jaxpaged events``: check or show a page-event log."""

import argparse
import sys
from typing import Any

from jaxpaged.commands.exit_codes import EXIT_FAILED, EXIT_OK
from jaxpaged.events import check_main

EPILOG = """\
examples:
  jaxpaged generate --config job.yaml --event-log out/pages.jsonl
  jaxpaged events check out/pages.jsonl
  jaxpaged events show out/pages.jsonl

exit codes:
  0    the log is consistent (check), or was shown
  1    the log breaks a rule of the page pool, or cannot be read
"""


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parser."""
    parser = commands.add_parser(
        "events",
        help="check or show a page-event log",
        description="Reads the page-event log that the engine's event_log option writes: every allocation, copy and release.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="replay the log and check every rule of the page pool")
    show = actions.add_parser("show", help="print what happened, step by step")
    for action in (check, show):
        action.add_argument("log", metavar="LOG", help="the log (JSON Lines)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    if args.action == "check":
        return EXIT_OK if check_main(args.log) == 0 else EXIT_FAILED
    return EXIT_OK if show_main(args.log, sys.stdout) in (0, None) else EXIT_FAILED

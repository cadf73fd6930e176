"""``jaxpaged events``: check or show a page-event log."""

import argparse
from typing import Any

from jaxpaged.events import check_main, show_main

EPILOG = """\
examples:
  jaxpaged generate --config job.yaml --event-log out/pages.jsonl
  jaxpaged events check out/pages.jsonl
  jaxpaged events show out/pages.jsonl --out pages.html

exit codes:
  0    the log is sound (check), or the page was written (show)
  1    the log breaks a rule of the page pool
  2    a file cannot be read or written
"""


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parser."""
    parser = commands.add_parser(
        "events",
        help="check or show a page-event log",
        description="Reads the page-event log that the engine's event_log option writes: every page taken and released.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="replay the log, check every rule of the page pool, print what happened")
    show = actions.add_parser("show", help="draw the log as an HTML page that needs nothing else")
    for action in (check, show):
        action.add_argument("log", metavar="LOG", help="the log (JSON Lines)")
    show.add_argument("--out", metavar="FILE", help="the page to write (default: LOG.html)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    return check_main(args.log) if args.action == "check" else show_main(args.log, args.out)

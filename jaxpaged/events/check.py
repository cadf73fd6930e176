"""``jaxpaged events check LOG``: is this log possible, and what happened in it?"""

import os
import sys

from jaxpaged.events.reader import LogViolation
from jaxpaged.events.replay import replay
from jaxpaged.events.stats import describe


def check_main(path: str | os.PathLike[str]) -> int:
    """Replays a log and prints a summary of each run, or the first rule it breaks.

    Args:
        path: a log written by ``EventLog``.

    Returns:
        Exit status: 0 for a sound log (a torn last line is reported and tolerated), 1 for a broken rule, 2 for a file that
        cannot be read. Problems go to standard error.
    """
    count = 0
    try:
        for run in replay(path):
            count += 1
            print(f"run {count}: every table and count agrees" + ("" if run.writes else " (no writes listed: fills unchecked)"))
            for line in describe(run.stats, writes=run.writes).splitlines():
                print(f"  {line}")
            if run.stats.torn:
                print(f"  line {run.stats.torn} is torn: the run was cut short", file=sys.stderr)
    except LogViolation as violation:
        print(f"{os.fspath(path)}: {violation}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{os.fspath(path)}: cannot be read: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0

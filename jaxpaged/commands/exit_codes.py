"""Exit codes of every command."""

EXIT_OK = 0
"""Done, and everything asked for is there."""
EXIT_FAILED = 1
"""The work failed; the message says what to do."""
EXIT_USAGE = 2
"""A flag or a config is wrong."""
EXIT_SOME_FAILED = 3
"""A job ran to its end, but some of its records are errors."""
EXIT_SIGNAL_BASE = 128
"""Plus the signal's number: 130 for SIGINT, 143 for SIGTERM."""

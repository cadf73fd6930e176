"""Reads page-event logs: replays and checks them (``check``), draws them as a page (``show``)."""

from jaxpaged.events.check import check_main
from jaxpaged.events.page import build_page, show_main
from jaxpaged.events.reader import LogViolation
from jaxpaged.events.replay import Replay, replay

__all__ = ["LogViolation", "Replay", "build_page", "check_main", "replay", "show_main"]

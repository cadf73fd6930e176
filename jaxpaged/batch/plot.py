"""The pool's occupancy over time: samples of bounded number, drawn into a PNG."""

import dataclasses

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxpaged.batch.errors import JobError
from jaxpaged.outputs import EngineStats

MAX_SAMPLES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """The pool at one moment.

    Attributes:
        time_s: seconds since the job's first step.
        used, cached: pages named by a block table; pages only the prefix index knows.
        wasted_slots: token slots of used pages that hold no token.
        running, waiting: sequences.
    """

    time_s: float
    used: int
    cached: int
    wasted_slots: int
    running: int
    waiting: int


class PoolTrace:
    """Collects samples, one a step; when they grow many, every second one is dropped and only every second step is kept on.

    Attributes:
        samples: those kept, in order.
        num_pages: pages of the pool.
        peak_used: most pages used at once, over every step.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.num_pages = 0
        self.peak_used = 0
        self._stride = 1
        self._seen = 0

    def add(self, time_s: float, stats: EngineStats) -> None:
        """Takes the state after a step."""
        self.num_pages = stats.num_pages
        self.peak_used = max(self.peak_used, stats.num_used_pages)
        if self._seen % self._stride == 0:
            self.samples.append(
                Sample(
                    time_s,
                    stats.num_used_pages,
                    stats.num_cached_pages,
                    stats.num_wasted_slots,
                    stats.num_running_seqs,
                    stats.num_waiting_seqs,
                )
            )
        self._seen += 1
        if len(self.samples) >= MAX_SAMPLES:
            self.samples = self.samples[::2]
            self._stride *= 2


def draw_pool(trace: PoolTrace, path: str) -> None:
    """Draws used and cached pages, wasted token slots, and running and waiting sequences over time.

    Args:
        trace: the samples; at least one.
        path: of the PNG.

    Raises:
        JobError: the file cannot be written.
    """
    times = [sample.time_s for sample in trace.samples]
    column = lambda name: [getattr(sample, name) for sample in trace.samples]
    figure = Figure(figsize=(10.5, 7), layout="constrained")
    FigureCanvasAgg(figure)
    pages, slots, seqs = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 2))
    pages.stackplot(
        times, column("used"), column("cached"), labels=("used", "cached"), colors=("#3b6fb6", "#b8d0ea"), step="post"
    )
    pages.axhline(trace.num_pages, color="#444444", linewidth=1, linestyle="--", label=f"pool: {trace.num_pages} pages")
    peak = max(sample.used + sample.cached for sample in trace.samples)
    pages.set_ylim(0, max(1, 1.08 * trace.num_pages if 2 * peak > trace.num_pages else 1.5 * peak))
    pages.set(ylabel="pages", title="Page pool over time")
    slots.fill_between(times, column("wasted_slots"), step="post", color="#d9862b", label="wasted: empty slots\nof used pages")
    slots.set(ylabel="token slots")
    slots.set_ylim(bottom=0)
    seqs.step(times, column("running"), where="post", color="#2d7d46", label="running")
    seqs.step(times, column("waiting"), where="post", color="#a33a3a", label="waiting")
    seqs.set(ylabel="sequences", xlabel="seconds since the first step")
    seqs.set_ylim(bottom=0)
    for axes in (pages, slots, seqs):
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), fontsize="small", frameon=False)
        axes.grid(alpha=0.25)
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise JobError(
            f"cannot write {path!r}: {error.strerror}; the records are complete, output.plot: false skips the picture"
        ) from error

"""Checks and times the GPU kernels on the GPU at hand, in under ten minutes, and writes a tuning table for it.

Runs from a plain checkout (nothing installed but jax with its CUDA plugin and numpy; Python 3.11 or newer):

    python scripts/check_gpu.py --out gpu_report              # everything
    python scripts/check_gpu.py --out gpu_report --install    # and use the tuning table from now on
    python scripts/check_gpu.py --out smoke --smoke           # on any CPU: tiny, interpreted; shows that it works

Sections have time boxes: correctness, timing, search. What did not fit is listed as left out. A watchdog ends the program a
minute after the limit whatever hangs, with what there is so far on disk. Exit code 0: every check passed; 1: one failed;
2: no GPU; 3: stopped by the watchdog.
"""

import argparse
import json
import os
import pathlib
import platform
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch wants memory beside JAX
if "--smoke" in sys.argv:  # interpreted kernels need no optimised machine code
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax  # noqa: E402 - the lines above must come first

from pallas_kernels.paged_attention.triton_tiles import TUNING_DIR  # noqa: E402
from scripts.gpu_check import bench, correct, report, tune  # noqa: E402
from scripts.gpu_check.clock import Box, Sizes  # noqa: E402

SHARES = {"correct": 0.3, "bench": 0.4, "tune": 0.3}


def sizes_for(smoke: bool) -> Sizes:
    """Sizes of a run on the device at hand."""
    if smoke:
        return Sizes(smoke=True, repeats=1, flush_bytes=1, max_pool_bytes=2**28)
    stats = jax.devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 16 * 2**30)
    return Sizes(smoke=False, repeats=20, flush_bytes=256 * 2**20, max_pool_bytes=int(0.4 * free))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("gpu_report"), help="folder for the report (made if absent)"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="limit of the whole run; sections get 30, 40 and 30 percent")
    parser.add_argument("--only", choices=sorted(SHARES), help="one section, with the whole time")
    parser.add_argument("--install", action="store_true", help="put the tuning table where the kernels read it")
    parser.add_argument("--smoke", action="store_true", help="tiny and interpreted, on CPU")
    return parser.parse_args()


def main() -> int:
    """Runs the sections and writes ``report.json``, ``report.md`` and the tuning table."""
    args = arguments()
    if not args.smoke and jax.default_backend() != "gpu":
        print(f"JAX sees no GPU (backend: {jax.default_backend()}). Install one of: jax[cuda12], jax[cuda13]; or pass --smoke.")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    results: dict = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "smoke": args.smoke,
        "finished": False,
    }

    def save() -> None:
        results["seconds"] = round(time.monotonic() - start, 1)
        (args.out / "report.json").write_text(json.dumps(results, indent=1, default=str) + "\n")
        (args.out / "report.md").write_text(report.markdown(results))

    def stop() -> None:
        save()
        print(f"stopped by the watchdog after {time.monotonic() - start:.0f} s; see {args.out}/report.md", flush=True)
        os._exit(3)

    watchdog = threading.Timer(60 * args.minutes + 60, stop)
    watchdog.daemon = True
    watchdog.start()
    sizes = sizes_for(args.smoke)
    for section, share in SHARES.items():
        if args.only in (None, section):
            box = Box(60 * args.minutes * (1.0 if args.only else share))
            print(f"{section} ...", flush=True)
            results |= SECTIONS[section](sizes, box)
            save()
    results["finished"] = True
    save()
    watchdog.cancel()
    if "tuning" in results:
        _write_table(results["tuning"], args.out, args.install)
    print((args.out / "report.md").read_text())
    return 0 if report.all_passed(results) else 1


def _correct(sizes: Sizes, box: Box) -> dict:
    return {"correctness": correct.run(sizes, box)}


def _bench(sizes: Sizes, box: Box) -> dict:
    bandwidth = bench.copy_bandwidth(sizes)
    mutations = bench.mutations(sizes, bandwidth)
    return {"copy_GB_per_s": bandwidth / 1e9, "mutations": mutations, "attention": bench.attention(sizes, box, bandwidth)}


def _tune(sizes: Sizes, box: Box) -> dict:
    return {"tuning": tune.run(sizes, box)}


SECTIONS = {"correct": _correct, "bench": _bench, "tune": _tune}


def _write_table(tuning: dict, out: pathlib.Path, install: bool) -> None:
    table = json.dumps({"device": tuning["device"], "tiles": tuning["tiles"]}, indent=1) + "\n"
    (out / tuning["file"]).write_text(table)
    if install:
        TUNING_DIR.mkdir(exist_ok=True)
        (TUNING_DIR / tuning["file"]).write_text(table)
        print(f"installed {TUNING_DIR / tuning['file']}")


if __name__ == "__main__":
    sys.exit(main())

"""Compiles every kernel, and whole model steps, for described TPUs and GPUs, prints a table and holds it against a budget.

    scripts/compile_env.sh                              # once: the compile plugins, in .venv-compile
    python scripts/compile_matrix.py --quick            # a small set, for every commit
    python scripts/compile_matrix.py                    # every op, every target, whole steps
    python scripts/compile_matrix.py --record           # and take today's counts as the budget

What must hold always: it compiles (or is refused with a reason, as recorded), a donated pool is aliased to the last byte and
never copied, temporary memory of a write, a copy or a step is below 1 % of the pool, and GPU kernels spill no register. What
must not get worse than recorded: TPU instruction bundles (5 % of slack) and spills (10 % and 16), GPU registers (8). Counts
are compared with those recorded under the same jax version, and registers only under the same ptxas (scripts/compile_env.sh
installs the one that counted: versions differ by a third on the same kernel). Predicted times are predictions: nothing here
runs.
"""

import argparse
import concurrent.futures
import functools
import json
import os
import pathlib
import sys
import time

from tqdm import tqdm

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pallas_kernels.targets import TARGETS, Compiled, Job, compile_many  # noqa: E402 - the line above must come first

BUDGET = ROOT / "scripts" / "compile_budget.json"
HEADS = {
    "32/8x128": (32, 8, 128),
    "9/3x64": (9, 3, 64),
    "8/1x128": (8, 1, 128),
    "32/32x128": (32, 32, 128),
    "16/2x256": (16, 2, 256),
    "32/8x80": (32, 8, 80),
}
STEPS = {  # model, context, per target: what fits beside the weights
    "v5p": ("llama-3-8b", 4096),
    "v6e": ("llama-3-8b", 1024),
    "h200": ("llama-3-8b", 4096),
    "v5e": ("llama-3.2-3b", 1024),
}
QUICK = ("v5e", "v6e", "h200")
CONTEXT, ROWS, KV_TILE = 2048, 64, 512


def default_python() -> str | None:
    """The interpreter with the compile plugins: ``COMPILE_PYTHON``, else that of ``.venv-compile``; None without one."""
    named = os.environ.get("COMPILE_PYTHON")
    if named:
        return named
    path = ROOT / ".venv-compile" / "bin" / "python"
    return str(path) if path.exists() else None


def page_size(platform: str, dtype: str) -> int:
    """The page size an engine would take."""
    return 128 if platform == "tpu" and dtype not in ("bfloat16", "float32") else 16


def job(op: str, platform: str, heads: str, dtype: str, quant: str | None = None, **more) -> Job:
    """A kernel job; its name says everything."""
    builder, tokens = {
        "decode": ("attention", None),
        "mixed": ("attention", 1024),
        "write": ("write", None),
        "write_many": ("write", 1024),
        "copy": ("copy", None),
        "swap": ("swap", None),
    }[op]
    kwargs = {"platform": platform, "heads": HEADS[heads], "dtype": dtype, "page_size": page_size(platform, dtype)} | more
    if quant:
        kwargs["quant"] = quant
    if tokens:
        kwargs["tokens"] = tokens
    return Job(f"{op} {heads} {dtype}{'/' + quant if quant else ''}", f"scripts.compile_cases:{builder}", kwargs)


def jobs_for(target: str, quick: bool) -> list[Job]:
    """The kernels to compile for a target."""
    platform = TARGETS[target].platform
    if quick:
        few = [("decode", "32/8x128", "bfloat16"), ("decode", "32/8x128", "int8"), ("write", "32/8x128", "int8")]
        few += [("mixed", "9/3x64", "bfloat16"), ("copy", "32/8x128", "int8")] if target != "v6e" else []
        return [job(op, platform, heads, dtype) for op, heads, dtype in few]
    main = "32/8x128"
    jobs = [job("decode", platform, heads, "bfloat16") for heads in HEADS]
    jobs += [job("decode", platform, main, dtype) for dtype in ("int8", "float8_e4m3fn", "float32")]
    jobs += [job("decode", platform, "9/3x64", "int8"), job("decode", platform, main, "int8", "tensor")]
    small = {"query_tile": 64} if target == "v4" else {}
    mixed = [(main, "bfloat16"), ("9/3x64", "bfloat16"), (main, "int8")]
    jobs += [job("mixed", platform, heads, dtype, **small) for heads, dtype in mixed]
    jobs += [job("write", platform, main, dtype) for dtype in ("bfloat16", "int8")] + [job("write", platform, "9/3x64", "int8")]
    jobs += [job("write", platform, main, "float8_e4m3fn", "tensor"), job("write_many", platform, main, "int8")]
    return jobs + [job(op, platform, main, "int8") for op in ("copy", "swap")]


def step_jobs(target: str) -> list[Job]:
    """Whole model steps to compile for a target: 64 sequences decoding, and a mixed step of 1,024 tokens."""
    if target not in STEPS:
        return []
    model, context = STEPS[target]
    base = {"platform": TARGETS[target].platform, "model": model, "page_size": 16, "context": context}
    build = "scripts.compile_cases:execute_step"
    return [
        Job(f"step decode {model}", build, base),
        Job(f"step mixed {model}", build, base | {"tokens": 1024}),
    ]


def chosen_jobs(target: str, quick: bool, steps: str, only: str = "") -> tuple[list[Job], list[Job]]:
    """A target's kernels unless ``steps`` is "only", and whole steps unless it is "no"."""
    kernels = [j for j in jobs_for(target, quick) if only in j.name and steps != "only"]
    return kernels, [j for j in step_jobs(target) if only in j.name and steps != "no"]


def run_target(target: str, jobs: tuple[list[Job], list[Job]], python: str, bar: tqdm) -> list[Compiled]:
    """Compiles kernels, then whole steps, for one target."""

    def tell(name: str) -> None:
        bar.set_postfix_str(f"{target} {name}", refresh=False)
        bar.update()

    kernels, whole = jobs
    compiled = functools.partial(compile_many, target, python=python, paths=(str(ROOT),), on_report=tell)
    return compiled(kernels) + compiled(whole, listings=False)


def predicted(report: Compiled, job_: Job) -> str:
    """For decode: time of one layer at 64 rows of 2,048 tokens against its memory floor, microseconds, as a prediction."""
    if not report.name.startswith("decode") or not report.ok:
        return ""
    target = TARGETS[report.target]
    _, kv_heads, dim = job_.kwargs["heads"]
    dtype, quant = job_.kwargs["dtype"], job_.kwargs.get("quant")
    size = {"float32": 4, "bfloat16": 2}.get(dtype, 1)
    token = 2 * kv_heads * dim * size + (8 * kv_heads if size == 1 and quant != "tensor" else 0)
    floor = ROWS * CONTEXT * token / target.bandwidth * 1e6
    bundles = [k.bundles for k in report.kernels if k.bundles and k.name.startswith("paged_decode")]
    if not bundles:
        return f"floor {floor:.0f}"
    compute = bundles[0] * ROWS * -(-CONTEXT // KV_TILE) / target.cores / target.clock_hz * 1e6
    return f"{max(floor, compute):.0f} / floor {floor:.0f}"


def judge(report: Compiled, budget: dict) -> list[str]:
    """What is wrong with a report, in words."""
    of_target = budget.get(report.jax_version, {}).get(report.target, {})
    known = of_target.get(report.name)
    same_ptxas = report.ptxas_version == of_target.get("ptxas")
    if not report.ok:
        if report.error.startswith("KernelUnsupportedError"):
            refused = any(
                isinstance(t, dict) and t.get(report.target, {}).get(report.name) == "refused" for t in budget.values()
            )
            return [] if refused or not budget else ["is refused, but not so in the budget"]
        return ["does not compile"]
    wrong = []
    if report.donated_bytes:
        if report.alias_bytes < report.donated_bytes:
            wrong.append(f"aliases {report.alias_bytes} of {report.donated_bytes} donated bytes")
        if report.large_copies:
            wrong.append(f"copies the pool {report.large_copies} times")
        # A whole step may keep its activations and logits: they do not grow with the pool.
        if report.temp_bytes > max(report.donated_bytes // 100, 8 << 20) and "mixed" not in report.name:
            wrong.append(f"temporary memory {report.temp_bytes / 2**20:.1f} MiB, over 1 % of the pool")
    if TARGETS[report.target].platform == "gpu" and any(k.spills for k in report.kernels):
        wrong.append("spills registers")
    if isinstance(known, dict):
        for kernel in report.kernels:
            old = known.get(_plain(kernel.name))
            if not old:
                continue
            if kernel.bundles and kernel.bundles > 1.05 * old["bundles"]:
                wrong.append(f"{kernel.name}: {kernel.bundles} bundles, budget {old['bundles']}")
            if kernel.bundles and (kernel.spills or 0) > 1.1 * (old["spills"] or 0) + 16:
                wrong.append(f"{kernel.name}: {kernel.spills} spills, budget {old['spills']}")
            if same_ptxas and kernel.registers and kernel.registers > old["registers"] + 8:
                wrong.append(f"{kernel.name}: {kernel.registers} registers, budget {old['registers']}")
    return wrong


def _plain(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def to_budget(reports: list[Compiled], budget: dict) -> dict:
    """The budget with these reports' counts in it."""
    for report in reports:
        version = report.jax_version or next((r.jax_version for r in reports if r.jax_version), "")
        entry = budget.setdefault(version, {}).setdefault(report.target, {})
        if not report.ok:
            if report.error.startswith("KernelUnsupportedError"):
                entry[report.name] = "refused"
            continue
        if report.ptxas_version:
            entry["ptxas"] = report.ptxas_version
        counts = {}
        for k in report.kernels:
            fields = {"bundles": k.bundles, "spills": k.spills, "registers": k.registers, "copies16": k.copies16}
            other = counts.get(_plain(k.name), {})  # one kernel may run twice, on data and on scales: the larger one counts
            counts[_plain(k.name)] = {n: max(v, other.get(n, 0)) for n, v in fields.items() if v is not None}
        entry[report.name] = counts
    return budget


def table(reports: list[Compiled], jobs: dict[tuple[str, str], Job]) -> str:
    """One line a report."""
    lines = [
        "| op | target | result | alias | temp MiB | needs GiB | copies | kernels: bundles or registers (spills) | "
        "16-byte copies | predicted us a layer |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in reports:
        counts = ", ".join(f"{_plain(k.name)} {k.bundles or k.registers} ({k.spills})" for k in r.kernels)
        result = f"{r.seconds:.1f} s" if r.ok else ("refused" if r.error.startswith("KernelUnsupported") else "FAILED")
        alias = f"{r.alias_bytes / r.donated_bytes:.0%}" if r.donated_bytes else "-"
        copies = ", ".join(str(k.copies16) for k in r.kernels if k.copies16 is not None)
        needs = (r.argument_bytes + r.output_bytes - r.alias_bytes + r.temp_bytes) / 2**30
        note = predicted(r, jobs[r.target, r.name])
        lines.append(
            f"| {r.name} | {r.target} | {result} | {alias} | {r.temp_bytes / 2**20:.1f} | {needs:.2f} | {r.large_copies} "
            f"| {counts} | {copies} | {note} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the matrix; returns 0 if all is well, 1 if something is wrong, 2 without compile plugins."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small set, under 90 seconds")
    parser.add_argument("--record", action="store_true", help="write the counts to the budget file")
    parser.add_argument("--targets", default="", help="comma-separated subset of " + ",".join(TARGETS))
    parser.add_argument("--steps", choices=("yes", "no", "only"), default="yes", help="whole model steps (not in --quick)")
    parser.add_argument("--only", default="", help="only jobs whose name contains this")
    parser.add_argument("--python", default=default_python(), help="interpreter with the compile plugins")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args(argv)
    if not args.python:
        print("no .venv-compile here; make it with scripts/compile_env.sh, or set COMPILE_PYTHON")
        return 2
    chosen = [t for t in args.targets.split(",") if t] or list(QUICK if args.quick else TARGETS)
    steps = args.steps if not args.quick else "no"
    start = time.monotonic()

    work = {target: chosen_jobs(target, args.quick, steps, args.only) for target in chosen}
    jobs = {(target, j.name): j for target, both in work.items() for part in both for j in part}
    with (
        concurrent.futures.ThreadPoolExecutor(args.workers) as workers,
        tqdm(total=len(jobs), desc="compiling", unit="job", disable=None) as bar,
    ):
        found = workers.map(lambda target: run_target(target, work[target], args.python, bar), chosen)
        reports = [r for of_target in found for r in of_target]
    print(table(reports, jobs))
    budget = json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
    if args.record:
        budget = to_budget(reports, budget)
        BUDGET.write_text(json.dumps(budget, indent=1, sort_keys=True) + "\n")
    wrong = [(r, text) for r in reports for text in judge(r, budget)]
    for report, text in wrong:
        print(f"WRONG {report.target} {report.name}: {text} {report.error}")
    for report in reports:
        if not report.ok and report.error.startswith("KernelUnsupported"):
            print(f"refused {report.target} {report.name}: {report.error}")
    print(f"{len(reports)} compiled for {len(chosen)} targets in {time.monotonic() - start:.0f} s, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

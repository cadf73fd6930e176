"""The report as Markdown."""

from typing import Any


def all_passed(results: dict[str, Any]) -> bool:
    """Whether every check of the run passed (left-out ones do not count)."""
    rows = results.get("correctness", []) + results.get("mutations", [])
    timed = [
        row
        for row in results.get("attention", [])
        if "problem" in row and not row["problem"].startswith(("left out", "Memory"))
    ]
    return all(row.get("passed") for row in rows) and not timed


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Rows as a Markdown table; missing values stay empty."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(cell(row.get(column)) for column in columns) + " |")
    return "\n".join(lines)


def cell(value: Any) -> str:
    """A value as it stands in a table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, list):
        return "; ".join(map(str, value)).replace("|", "/")
    return str(value).replace("|", "/")


def markdown(results: dict[str, Any]) -> str:
    """The whole report; sections that have not run are left out."""
    mode = "interpreted on CPU (smoke run: times mean nothing)" if results["smoke"] else "run on hardware"
    parts = [
        f"# GPU check: {results['device']}",
        f"jax {results['jax']}, Python {results['python']}; {mode}; {results.get('seconds', 0)} s; "
        f"{'finished' if results['finished'] else 'NOT FINISHED'}",
    ]
    if "correctness" in results:
        rows = results["correctness"]
        failed = [row for row in rows if not row.get("passed")]
        parts.append(f"## Correctness\n\n{len(rows) - len(failed)} of {len(rows)} passed.")
        columns = ["op", "case", "passed", "error", "allowed", "lse_error", "differing_bytes", "seconds", "problem"]
        shown = failed + [row for row in rows if row["op"] != "paged_attention" and row.get("passed")]
        parts.append(table(shown, columns))
    if "copy_GB_per_s" in results:
        parts.append(f"## Bandwidth\n\nA plain elementwise pass moves {results['copy_GB_per_s']:,.0f} GB/s (read + written).")
        parts.append(table(results["mutations"], ["op", "dtype", "us", "GB_per_s", "share_of_copy", "passed", "problem"]))
        columns = [
            "point",
            "us",
            "GB_per_s",
            "share_of_copy",
            "TFLOP_per_s",
            "xla_us",
            "in_tree_us",
            "sdpa_us",
            "problem",
            "remarks",
        ]
        parts.append("## Attention\n\n" + table(results["attention"], columns))
    if "tuning" in results:
        tuning = results["tuning"]
        rows = [
            {"format": key} | {"changed": ", ".join(f"{a}={b}" for a, b in value.items())}
            for key, value in tuning["tiles"].items()
        ]
        parts.append("## Search\n\n" + (table(rows, ["format", "changed"]) if rows else "No setting beat the defaults by 2 %."))
        parts.append("### Split length\n\n" + table(tuning["split_lengths"], ["point", "split_len", "us"]))
    return "\n\n".join(parts) + "\n"

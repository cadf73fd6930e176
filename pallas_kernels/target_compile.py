"""The process behind ``targets.compile_many``: compiles jobs for one described device and reads the compiler's listings.

Run as ``python -m pallas_kernels.target_compile TARGET JOBS.json REPORTS.jsonl DUMP_DIR`` under ``targets.environment``.
"""

import contextlib
import dataclasses
import importlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, SingleDeviceSharding

from pallas_kernels import targets
from pallas_kernels.targets import Compiled, Kernel, Target

_SIZES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_COPY = re.compile(r"= \(?(\w+)\[([\d,]*)\]\S* (?:copy|copy-start|transpose|reverse)\(")


def device(target: Target):
    """The described device of a target.

    Args:
        target: an entry of ``TARGETS``.

    Returns:
        A device of a compile-only topology.
    """
    if target.platform == "tpu":
        return topologies.get_topology_desc(target.topology, "tpu").devices[0]
    config = pathlib.Path(targets.__file__).parent / "target_configs" / f"{target.name}.txtpb"
    return topologies.get_topology_desc("1x1x1", "cuda", target_config=config.read_text(), topology="1x1x1").devices[0]


@contextlib.contextmanager
def described(target: Target, dev):
    """While it lasts, lowering takes ``dev`` for the device of the program.

    Args:
        target: an entry of ``TARGETS``.
        dev: its device.

    Yields:
        Nothing.
    """
    from jax._src.mesh import AbstractDevice

    if target.platform == "tpu":
        abstract = AbstractDevice(device_kind=dev.device_kind, num_cores=dev.num_cores, platform="tpu")
    else:
        abstract = AbstractDevice(device_kind=target.device_kind, num_cores=None, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=abstract)):
        yield


def compile_here(target: Target, dev, name: str, fn, args, donate=()) -> tuple[Compiled, str]:
    """Lowers and compiles ``fn`` in this process.

    Args:
        target: an entry of ``TARGETS``.
        dev: its described device.
        name: label of the report.
        fn: function to jit.
        args: tuple of pytrees of ``jax.ShapeDtypeStruct``.
        donate: positions of donated arguments.

    Returns:
        The report without kernels, and the optimised HLO.
    """
    start = time.perf_counter()
    sharding = SingleDeviceSharding(dev)
    args = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), args)
    with described(target, dev):
        executable = jax.jit(fn, donate_argnums=donate).lower(*args).compile()
    seconds = time.perf_counter() - start
    memory: Any = executable.memory_analysis()
    hlo = executable.as_text() or ""
    sizes = [int(np.prod(x.shape)) * x.dtype.itemsize for i in donate for x in jax.tree.leaves(args[i])]
    return (
        Compiled(
            name=name,
            target=target.name,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            donated_bytes=sum(sizes),
            large_copies=count_copies(hlo, max(sizes, default=0) // 2) if sizes else 0,
            seconds=round(seconds, 2),
            jax_version=jax.__version__,
        ),
        hlo,
    )


def count_copies(hlo: str, at_least: int) -> int:
    """Copies (and transposes) in an HLO text whose result has at least ``at_least`` bytes."""
    found = 0
    for kind, dims in _COPY.findall(hlo):
        elements = int(np.prod([int(d) for d in dims.split(",") if d], dtype=np.int64))
        found += elements * _SIZES.get(kind, 1) >= max(at_least, 1)
    return found


def tpu_kernels(files: list[pathlib.Path], hlo: str) -> tuple[Kernel, ...]:
    """Bundle and spill counts of the Pallas kernels among the LLO listings ``files``."""
    custom = set(re.findall(r"%?([\w.\-]+) = [^\n]*custom_call_target=\"tpu_custom_call\"", hlo))
    bundles: dict[str, int] = {}
    spills: dict[str, int] = {}
    for path in files:
        match = re.match(
            r"\d+-(.+)-\d+-(schedule-analysis_final_bundles|final_hlo-static-per-bundle-utilization)\.txt", path.name
        )
        if not match or match[1] not in custom:
            continue
        text = path.read_text(errors="replace")
        if match[2].startswith("schedule"):
            bundles[match[1]] = int(re.findall(r"total scheduled bundles:\s+(\d+)", text)[0])
        else:
            names = [n.strip() for n in text.splitlines()[1].split(",")]
            column = names.index("VSTORE:SPILL")
            rows = [line.split() for line in text.splitlines()[4:]]
            spills[match[1]] = sum(int(row[column]) for row in rows if len(row) == len(names))
    return tuple(Kernel(name=n, bundles=b, spills=spills.get(n)) for n, b in sorted(bundles.items()))


def find_ptxas() -> tuple[str, str]:
    """Path and version of the toolkit's ``ptxas``, as ``targets.find_cuda`` finds it; empty where there is none."""
    path = shutil.which("ptxas", path=f"{targets.find_cuda()}/bin") or shutil.which("ptxas")
    if not path:
        return "", ""
    words = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return path, next(iter(re.findall(r"\bV(\d+[\d.]*)", words)), "unknown")


def gpu_kernels(files: list[pathlib.Path], arch: str, ptxas: str) -> tuple[Kernel, ...]:
    """Registers, spills, shared memory and 16-byte copies of the kernels in the dumped PTX, by ``ptxas -v``."""
    found = []
    for path in files:
        if path.suffix != ".ptx" or not ptxas:
            continue
        text = path.read_text()
        copies = {}
        for entry in re.split(r"(?=\.(?:visible )?\.?entry )", text)[1:]:
            name = re.match(r"\.(?:visible )?\.?entry (\w+)", entry)
            if name:
                copies[name[1]] = len(re.findall(r"cp\.async\.cg[^;]*?, (?:16|0x10)\b", entry))
        run = subprocess.run(
            [ptxas, "-v", f"-arch={arch}", str(path), "-o", "/dev/null"], capture_output=True, text=True, check=False
        )
        pattern = (
            r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?"
        )
        for name, spill, registers, shared in re.findall(pattern, run.stderr, re.S):
            found.append(
                Kernel(
                    name=name,
                    spills=int(spill),
                    registers=int(registers),
                    shared_bytes=int(shared or 0),
                    copies16=copies.get(name, 0),
                )
            )
    return tuple(found)


def main(name: str, request: str, result: str, dump: str) -> None:
    """Compiles every job of ``request`` and appends one JSON line per job to ``result``."""
    target = targets.TARGETS[name]
    dev = device(target)
    folder = pathlib.Path(dump)
    ptxas, ptxas_version = find_ptxas() if target.platform == "gpu" else ("", "")
    for job in json.loads(pathlib.Path(request).read_text()):
        for path in folder.iterdir():
            path.unlink()
        try:
            module, _, function = job["build"].partition(":")
            fn, args, donate = getattr(importlib.import_module(module), function)(**job["kwargs"])
            report, hlo = compile_here(target, dev, job["name"], fn, args, donate)
            files = sorted(folder.iterdir())
            kernels = tpu_kernels(files, hlo) if target.platform == "tpu" else gpu_kernels(files, target.arch, ptxas)
            report = dataclasses.replace(report, kernels=kernels, ptxas_version=ptxas_version)
        except Exception as error:  # every failure of one job is its report
            lines = [x for x in str(error).splitlines() if x.strip()] or [""]
            report = Compiled(job["name"], name, error=f"{type(error).__name__}: {' | '.join(lines)[:900]}")
        with open(result, "a") as sink:
            sink.write(json.dumps(dataclasses.asdict(report)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

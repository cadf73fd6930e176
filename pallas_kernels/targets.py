"""Described devices: compile any function for a TPU or GPU that is not there, and read back what the compiler did.

``TARGETS`` names the devices with their peak figures. ``compile_many`` compiles jobs for one target in a process of its own
(a failing code generator aborts its process) and returns one ``Compiled`` report per job: bytes aliased and temporary,
copies as large as a donated argument, and, per Pallas kernel, TPU instruction bundles and spills, or GPU registers, spills,
shared memory and 16-byte asynchronous copies.

A job names its function by import path, ``"module:function"`` with keyword arguments in JSON; that function returns
``(fn, args, donate)`` with ``args`` a tuple of pytrees of ``jax.ShapeDtypeStruct``. Jobs therefore run under any Python
environment that has the compile plugins, which need not be the caller's (``scripts/compile_env.sh`` makes one).
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Literal

_HERE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to compile for. Figures are peaks of one chip as published by its maker.

    Attributes:
        name: key in ``TARGETS``.
        platform: "tpu" or "gpu".
        device_kind: JAX's name of the device.
        bandwidth: device memory bytes per second.
        flops: dense bfloat16 operations per second.
        memory_bytes: device memory.
        cores: cores a program is spread over by itself or by a parallel grid axis (TPU tensor cores of one JAX device).
        clock_hz: clock assumed for turning instruction counts into time (TPU; 0 where not used).
        topology: TPU topology string; "" for GPU.
        arch: ptxas architecture; "" for TPU.
        vmem_bytes: TPU vector memory per core; 0 for GPU.
    """

    name: str
    platform: Literal["tpu", "gpu"]
    device_kind: str
    bandwidth: float
    flops: float
    memory_bytes: int
    cores: int = 1
    clock_hz: float = 0.0
    topology: str = ""
    arch: str = ""
    vmem_bytes: int = 0


# Source: Cloud TPU documentation, system architecture page of each generation (HBM bandwidth and capacity, bf16 peak; v7x is
# halved, since JAX shows its two cores as two devices); NVIDIA data sheets of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200
# (dense bf16). VMEM: the sizes at which the TPU compiler starts to refuse. Clocks: v5e's follows from its peak (operations per
# cycle of its matrix units), the others are assumed.
TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("a100", "gpu", "NVIDIA A100-SXM4-80GB", 2.039e12, 312e12, 80 * 10**9, arch="sm_80"),
        Target("h100", "gpu", "NVIDIA H100 80GB HBM3", 3.35e12, 989e12, 80 * 10**9, arch="sm_90a"),
        Target("h200", "gpu", "NVIDIA H200", 4.8e12, 989e12, 141 * 10**9, arch="sm_90a"),
        Target("b200", "gpu", "NVIDIA B200", 8.0e12, 2250e12, 180 * 10**9, arch="sm_100a"),
        Target("v4", "tpu", "TPU v4", 1.228e12, 275e12, 32 * 2**30, 2, 1.05e9, "v4:2x2x1", vmem_bytes=16 * 2**20),
        Target("v5e", "tpu", "TPU v5 lite", 0.819e12, 197e12, 16 * 2**30, 1, 1.5e9, "v5e:2x2", vmem_bytes=128 * 2**20),
        Target("v5p", "tpu", "TPU v5", 2.765e12, 459e12, 95 * 2**30, 2, 1.75e9, "v5p:2x2x1", vmem_bytes=64 * 2**20),
        Target("v6e", "tpu", "TPU v6 lite", 1.638e12, 918e12, 32 * 2**30, 1, 1.75e9, "v6e:2x2", vmem_bytes=128 * 2**20),
        Target("v7x", "tpu", "TPU7x", 3.69e12, 1153.5e12, 96 * 2**30, 1, 2.0e9, "tpu7x:2x2x1", vmem_bytes=64 * 2**20),
    )
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the compiler made of one Pallas kernel (or, on GPU, of one generated kernel that is large enough to matter).

    Attributes:
        name: the kernel's name.
        bundles: TPU: static VLIW bundles, prologue included; each loop body counted once.
        spills: TPU: bundles that store a spilled register. GPU: bytes spilled (stores).
        registers: GPU: registers a thread.
        shared_bytes: GPU: static shared memory.
        copies16: GPU: 16-byte asynchronous copies in the PTX.
    """

    name: str
    bundles: int | None = None
    spills: int | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    copies16: int | None = None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Report of one job.

    Attributes:
        name, target: as in the job.
        error: empty when it compiled, else the reason (last line of the failure).
        argument_bytes, output_bytes, alias_bytes, temp_bytes: memory analysis of the executable, padding included.
        donated_bytes: bytes of the donated arguments as their shapes say.
        large_copies: HLO instructions that copy at least half of the largest donated array.
        kernels: one entry per kernel.
        seconds: wall-clock time of lowering and compiling.
        jax_version: of the process that compiled it.
        ptxas_version: GPU: of the assembler that counted the registers; another version counts differently.
    """

    name: str
    target: str
    error: str = ""
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    donated_bytes: int = 0
    large_copies: int = 0
    kernels: tuple[Kernel, ...] = ()
    seconds: float = 0.0
    jax_version: str = ""
    ptxas_version: str = ""

    @property
    def ok(self) -> bool:
        """Whether it compiled."""
        return not self.error

    @property
    def in_place(self) -> bool:
        """Whether every donated byte is aliased and none of it copied on the way."""
        return self.ok and self.alias_bytes >= self.donated_bytes and not self.large_copies


@dataclasses.dataclass(frozen=True)
class Job:
    """Something to compile.

    Attributes:
        name: label in the report.
        build: ``"module:function"``; called with ``kwargs``, returns ``(fn, args, donate)``: a function to jit, a tuple of
            pytrees of ``jax.ShapeDtypeStruct``, and the positions of donated arguments.
        kwargs: JSON-able keyword arguments.
    """

    name: str
    build: str
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


def find_cuda(python: str | None = None) -> str | None:
    """Root of a CUDA toolkit (with ``bin/ptxas`` and ``nvvm/libdevice``).

    The ``nvidia-cuda-nvcc-cu12`` wheel beside the interpreter comes first, so that counts do not depend on what else a machine
    has; then ``CUDA_HOME``, the folder of ``ptxas`` on the PATH, and ``/usr/local/cuda``.

    Args:
        python: interpreter of the process that will compile; None for the running one.

    Returns:
        The folder, or None where there is none (compiling then relies on what the CUDA plugin brings).
    """
    lib = pathlib.Path(python or sys.executable).parent.parent / "lib"
    roots = [
        *map(str, lib.glob("python*/site-packages/nvidia/cuda_nvcc")),
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
    ]
    ptxas = shutil.which("ptxas")
    if ptxas:
        roots.append(str(pathlib.Path(ptxas).resolve().parent.parent))
    roots.append("/usr/local/cuda")
    for root in roots:
        if root and (pathlib.Path(root) / "nvvm" / "libdevice").is_dir():
            return root
    return None


def environment(target: Target, dump_dir: str | None, python: str | None = None) -> dict[str, str]:
    """Environment variables under which a process can compile for ``target``; they must be set before jax is imported.

    Args:
        target: the device.
        dump_dir: folder for the compiler's listings; None for no listings (whole models have very many).
        python: interpreter of that process; None for the running one.

    Returns:
        Variables to add to the process's environment.
    """
    env = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    if target.platform == "tpu":
        env |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_LOG_DIR": "disabled",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump_dir} --xla_jf_dump_llo_text=true" if dump_dir else "",
        }
    else:
        flags = ["--xla_gpu_autotune_level=0"]  # none of the caller's: counts must not depend on them
        if dump_dir:
            flags.append(f"--xla_dump_to={dump_dir}")
        cuda = find_cuda(python)
        if cuda:
            flags.append(f"--xla_gpu_cuda_data_dir={cuda}")
        env["XLA_FLAGS"] = " ".join(flags)
    return env


def compile_many(
    target: str,
    jobs: list[Job],
    *,
    python: str | None = None,
    paths: tuple[str, ...] = (),
    timeout_s: float = 600.0,
    listings: bool = True,
    on_report: Callable[[str], None] | None = None,
) -> list[Compiled]:
    """Compiles jobs for a described device, one after the other, in a process of its own.

    A job that takes the process down is reported as failed and the rest go on in a fresh process.

    Args:
        target: a key of ``TARGETS``.
        jobs: what to compile.
        python: interpreter with jax, the TPU compiler or the CUDA plugin; None for the running one.
        paths: folders to put in front of the module search path of that process.
        timeout_s: longest silence while one job is compiled.
        listings: read the compiler's listings; without them reports have no kernels.
        on_report: called with the name of every job as its report comes in.

    Returns:
        One report per job, in order.

    Raises:
        ValueError: no such target.
    """
    if target not in TARGETS:
        raise ValueError(f"target: got {target!r}, wants one of {', '.join(TARGETS)}")
    done: list[Compiled] = []
    while len(done) < len(jobs):
        left = jobs[len(done) :]
        reports, last_words = _run_worker(
            TARGETS[target], left, python or sys.executable, paths, timeout_s, listings, on_report
        )
        done += reports
        if len(done) < len(jobs):
            done.append(Compiled(jobs[len(done)].name, target, error=f"the compiler's process died: {last_words}"))
            if on_report is not None:
                on_report(done[-1].name)
    return done


def compile_for(target: str, build: str, *, python: str | None = None, paths: tuple[str, ...] = (), **kwargs) -> Compiled:
    """Compiles one function for a described device; see ``Job`` and ``compile_many``.

    Args:
        target: a key of ``TARGETS``.
        build: ``"module:function"``, called with ``kwargs``.
        python, paths: as in ``compile_many``.
        kwargs: JSON-able keyword arguments of ``build``.

    Returns:
        The report.
    """
    return compile_many(target, [Job(build, build, kwargs)], python=python, paths=paths)[0]


def _run_worker(target: Target, jobs: list[Job], python: str, paths, timeout_s: float, listings: bool, on_report):
    with tempfile.TemporaryDirectory(prefix="jaxpaged-compile-") as folder:
        dump = os.path.join(folder, "dump")
        os.mkdir(dump)
        # None of the caller's compiler settings: importing jax sets TPU_LIBRARY_PATH to that interpreter's own library.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "TPU_", "LIBTPU_"))}
        env = inherited | environment(target, dump if listings else None, python)
        env["PYTHONPATH"] = os.pathsep.join([str(p) for p in paths] + [str(_HERE.parent), env.get("PYTHONPATH", "")])
        request = os.path.join(folder, "jobs.json")
        result = os.path.join(folder, "reports.jsonl")
        pathlib.Path(request).write_text(json.dumps([dataclasses.asdict(j) for j in jobs]))
        pathlib.Path(result).touch()
        log = os.path.join(folder, "log")
        command = [python, "-m", "pallas_kernels.target_compile", target.name, request, result, dump]
        with open(log, "wb") as sink:
            process = subprocess.Popen(command, env=env, stdout=sink, stderr=subprocess.STDOUT, cwd=folder)
            words = _wait(process, pathlib.Path(result), timeout_s, [job.name for job in jobs], on_report)
        reports = [_report(json.loads(line)) for line in pathlib.Path(result).read_text().splitlines()]
        lines = [x for x in pathlib.Path(log).read_text(errors="replace").splitlines() if x.strip()]
        fatal = [x for x in lines if "Check failed" in x or "Error" in x or x.startswith("F0")]
        return reports, words or (fatal or lines or ["no output"])[-1][:500]


def _wait(process: subprocess.Popen, result: pathlib.Path, timeout_s: float, names: list[str], on_report) -> str:
    """Waits for the process's end, telling ``on_report`` of each line of ``result``; ends it if silent for too long."""
    told, since = 0, time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        count = result.read_bytes().count(b"\n")
        if count > told:
            since = time.monotonic()
        while told < count:
            if on_report is not None:
                on_report(names[told])
            told += 1
        if process.returncode is not None:
            return ""
        if time.monotonic() - since > timeout_s:
            process.kill()
            process.wait()
            return f"no answer within {timeout_s:.0f} s"


def _report(fields: dict[str, Any]) -> Compiled:
    kernels = tuple(Kernel(**k) for k in fields.pop("kernels", ()))
    return Compiled(**fields, kernels=kernels)

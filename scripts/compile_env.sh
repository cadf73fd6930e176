#!/usr/bin/env bash
# Makes .venv-compile: an interpreter that sees everything in .venv and, besides, the TPU compiler (libtpu), the CUDA plugin of
# the same jax version and the ptxas that counted the recorded registers. With it, kernels and whole steps compile for TPUs and
# GPUs that are not there. The plugins stay out of .venv, so that programs on CPU never load them. About 1 GB; needs .venv
# (scripts/test.sh or scripts/demo.sh make it).
set -euo pipefail
cd "$(dirname "$0")/.."
base="${1:-.venv}"
venv="${2:-.venv-compile}"
python="$base/bin/python"
[ -x "$python" ] || { echo "no $python; run scripts/test.sh first" >&2; exit 1; }
version="$("$python" -c 'import jax; print(jax.__version__)')"
stamp="$venv/.stamp-$version-nvcc-12.9.86"
[ -e "$stamp" ] && exit 0
rm -rf "$venv"
"$python" -m venv "$venv"
site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
"$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site/base.pth"
libtpu="$("$python" -c 'import importlib.metadata as m; print(next(r.split(";")[0] for r in m.requires("jax") if r.startswith("libtpu")))')"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
  "${libtpu// /}" "jax-cuda12-plugin==$version" "jax-cuda12-pjrt==$version" nvidia-cuda-nvcc-cu12==12.9.86
touch "$stamp"

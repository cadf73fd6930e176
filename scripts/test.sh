#!/usr/bin/env bash
# Sets up .venv and runs every check: format, lint, import rules, types, tests. With --all the long tests too, and the compilers
# for GPUs and TPUs that are not there (an environment of their own, about 1 GB). With --grid the kernels' whole grid (an hour).
# Other arguments go to pytest: scripts/test.sh tests/host -k batch
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh

all=
case "${1:-}" in
  --all | --grid)
    all="${1#--}"
    shift
    ;;
esac

make_venv
once test install_test
link_model
if [ -n "$all" ]; then
  say "compilers for described devices"
  scripts/compile_env.sh || say "could not be installed; the tests that want them will say so"
fi

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 MPLBACKEND=Agg
say "ruff"
"$VENV/bin/ruff" format --check --quiet .
"$VENV/bin/ruff" check --quiet .
say "import-linter"
"$VENV/bin/lint-imports" --no-cache
say "pyright"
"$VENV/bin/python" -m pyright --pythonpath "$VENV/bin/python"
run() { "$VENV/bin/python" -m pytest -n 2 --dist loadfile "$@"; }
if [ "$all" = grid ]; then
  say "pytest: the kernels' whole grid"
  run -m grid "$@"
  exit
fi
say "pytest"
run -m "not long" "$@"
if [ -n "$all" ]; then
  say "pytest: the long tail"
  run -m "long and not grid" "$@"
fi

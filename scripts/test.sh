#!/usr/bin/env bash
# Sets up .venv and runs every check: format, lint, import rules, types, tests. With --all the long tests too, and the compilers
# for GPUs and TPUs that are not there (an environment of their own, about 1 GB).
# Other arguments go to pytest: scripts/test.sh tests/host -k batch
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh

select=(-m "not long")
all=
if [ "${1:-}" = "--all" ]; then
  select=(-m "long or not long")
  all=1
  shift
fi

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
say "pytest"
exec "$VENV/bin/python" -m pytest -n 2 --dist loadfile "${select[@]}" "$@"

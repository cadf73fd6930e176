#!/usr/bin/env bash
# Sets up .venv and runs every check: format, lint, import rules, types, tests. With --all the long tests too.
# Other arguments go to pytest: scripts/test.sh tests/host -k batch
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh

select=(-m "not long")
if [ "${1:-}" = "--all" ]; then
  select=(-m "long or not long")
  shift
fi

make_venv
once test install_test
link_model

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 MPLBACKEND=Agg
say "ruff"
"$VENV/bin/ruff" format --check --quiet .
"$VENV/bin/ruff" check --quiet .
say "import-linter"
"$VENV/bin/lint-imports" --no-cache
say "pyright"
"$VENV/bin/python" -m pyright --pythonpath "$VENV/bin/python"
say "pytest"
exec "$VENV/bin/python" -m pytest "${select[@]}" "$@"

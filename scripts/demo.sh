#!/usr/bin/env bash
# The demo, from a bare machine with Python 3.11 or newer: sets up .venv, installs jaxpaged and a small model, answers 32 prompts.
# Arguments are passed on: scripts/demo.sh --set engine.page_size=4
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh

make_venv
once demo install_demo
link_model
mkdir -p out
"$VENV/bin/jaxpaged" generate --config configs/demo.yaml --overwrite "$@"

say "the answers (out/demo.jsonl)"
"$VENV/bin/python" - <<'PY'
import json

with open("out/demo.jsonl", encoding="utf-8") as file:
    for line in file:
        record = json.loads(line)
        if "error" in record:
            print(f"{record['id']:<13} ERROR {record['error']['message']}")
        for output in record.get("outputs", ()):
            text = " ".join(output["text"].split())
            print(f"{record['id']:<13} {text[:110]}{'...' if len(text) > 110 else ''}")
PY

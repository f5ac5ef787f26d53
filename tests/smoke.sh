#!/usr/bin/env bash
# Smoke test of an installed wheel: smoke.sh BIN, the bin folder of an environment that holds draftpair and no MLX.
set -euo pipefail
bin=$(cd "$1" && pwd)
cd "$(mktemp -d)"

expect() { # expect CODE COMMAND...: the command ends with that exit code
  local code=$1 got=0
  shift
  "$@" > out 2> err || got=$?
  [ "$got" = "$code" ] || { echo "expected exit $code, got $got: $*"; cat out err; exit 1; }
}

"$bin/python" - <<'PYTHON'
from pathlib import Path
from draftpair.toy import write_toy
write_toy(Path("raw"), with_head=True)
write_toy(Path("target"), with_head=False)
PYTHON
expect 0 "$bin/draftpair" --version
expect 0 "$bin/python" -m draftpair --help
expect 0 "$bin/draftpair" inspect raw --require-head
expect 1 "$bin/draftpair" inspect target --require-head
expect 0 "$bin/draftpair" split-mtp --model raw --output drafter
expect 0 "$bin/draftpair" validate target drafter --strict
expect 0 "$bin/draftpair" validate drafter --json
expect 0 "$bin/draftpair" validate raw raw
expect 1 "$bin/draftpair" validate target target
expect 1 "$bin/draftpair" validate target drafter --draft-kind dflash --format sarif
expect 0 "$bin/hf-draftpair" validate target drafter --format github
expect 0 "$bin/draftpair" validate target --format junit --no-values
echo '{"target": "target", "drafter": "drafter"}' > pairs.jsonl
expect 0 "$bin/draftpair" validate --pairs pairs.jsonl --jobs 2
expect 0 "$bin/draftpair" check raw/config.json drafter/model.safetensors.index.json
expect 0 "$bin/draftpair" split-mtp --model raw --output quantized --q-bits 4 --q-override lm_head=mxfp8
expect 0 "$bin/draftpair" validate target quantized --strict
expect 0 "$bin/draftpair" attach --model target --drafter quantized --output whole
expect 0 "$bin/draftpair" inspect whole --require-head
expect 3 "$bin/draftpair" generate --model target --prompt abc
expect 3 "$bin/draftpair" bench --model target --prompt-lookup
grep -q 'pip install' err
expect 2 "$bin/draftpair" split-mtp --model raw
expect 3 "$bin/draftpair" inspect ./absent
expect 0 "$bin/draftpair" families --json
expect 0 "$bin/draftpair" schema inspect
expect 0 "$bin/draftpair" env
expect 0 "$bin/draftpair" inspect --help
echo "smoke test passed"

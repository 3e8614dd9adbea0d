#!/usr/bin/env bash
# Makes the local virtual environment .venv with everything that the demo and the tests need. Idempotent: a second run
# takes a second. Usage: bash launch/setup.sh   (PYTHON=python3.12 bash launch/setup.sh picks another interpreter)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/.megasync-setup
want=$(cat pyproject.toml launch/constraints.txt launch/setup.sh | cksum)
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ] &&
   .venv/bin/python -c 'import megasync, torch' 2>/dev/null; then
  exit 0
fi

python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.11 python3.12 python3.13 python3; do
    if command -v "$candidate" >/dev/null 2>&1 &&
       "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
fi
if [ -z "$python" ]; then
  echo "setup: no Python 3.11, 3.12 or 3.13 with the venv module was found; install one or set PYTHON=" >&2
  exit 1
fi

echo "setup: making .venv with $("$python" --version) (minutes on a fresh machine, seconds later)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check -q "$@" 2> >(grep -v '^WARNING: Location' >&2); }
# The CPU build of torch is enough here and much smaller; where pip finds none, the default build works as well.
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  pip install -c launch/constraints.txt torch
fi
pip install -c launch/constraints.txt -e '.[megatron,launch,s3,hf,dev]'
printf '%s\n' "$want" > "$stamp"
echo "setup: done"

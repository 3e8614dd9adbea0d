#!/usr/bin/env bash
# Sets up and runs the tests that need no GPU (under ten minutes on two cores). Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec .venv/bin/python -m pytest -n 2 --dist loadfile -m "not nightly" "$@"

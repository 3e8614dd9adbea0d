#!/usr/bin/env bash
# The main job on a machine without a GPU: Megatron-core ranks train and publish, a live Hugging Face model applies and
# generates the samples that they learn from. Sets everything up, then takes a few minutes on two cores.
# Usage: bash launch/demo.sh [overrides]   (configs/ has the choices; e.g. parallel=tp2_pp2, or demo=smoke for a short one)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore
# All ranks are here: gloo need not look up the host's name, which some containers cannot.
[ "$(uname)" != Linux ] || export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
python=.venv/bin/python

plan=$("$python" launch/check.py "$@") || exit 2
read -r ranks out <<< "$plan"

# Each of the two gets a process group of its own, so that it can be stopped with all that it started.
set -m
trainer='' rollout=''
stop() {
  for job in $trainer $rollout; do kill -TERM -- "-$job" 2>/dev/null || true; done
  for _ in $(seq 50); do
    alive=0
    for job in $trainer $rollout; do kill -0 -- "-$job" 2>/dev/null && alive=1; done
    [ "$alive" = 1 ] || return 0
    sleep 0.1
  done
  for job in $trainer $rollout; do kill -KILL -- "-$job" 2>/dev/null || true; done
}
trap stop EXIT
trap 'echo "demo: interrupted" >&2; exit 130' INT
trap 'echo "demo: stopped" >&2; exit 143' TERM

echo "demo: starting $ranks trainer ranks and the rollout process (imports take 20 seconds or so); logs are in $out"
"$python" launch/rollout.py "$@" > "$out/rollout.log" 2>&1 &
rollout=$!
"$python" -m torch.distributed.run --standalone --local-addr localhost --nproc-per-node "$ranks" launch/train.py "$@" \
  2> "$out/trainer.log" &
trainer=$!
set +m

# Waits for one of the two, named and given by its number; if it failed, says so and ends the demo, which stops the other.
finished() {
  local status=0 how
  wait "$2" 2>/dev/null || status=$?
  [ "$status" != 0 ] || return 0
  how="with status $status"
  [ "$status" -le 128 ] || how="by signal $((status - 128))"
  echo "demo: the $1 was ended $how, so the demo stops here; $out/$1.log says:" >&2
  { grep 'failed: ' "$out/$1.log" || tail -n 15 "$out/$1.log"; } | head -n 15 >&2
  exit 1
}
while kill -0 "$trainer" 2>/dev/null && kill -0 "$rollout" 2>/dev/null; do sleep 0.2; done
if kill -0 "$trainer" 2>/dev/null; then
  finished rollout "$rollout"
  finished trainer "$trainer"
else
  finished trainer "$trainer"
  finished rollout "$rollout"
fi
"$python" launch/demo/report.py "$@"

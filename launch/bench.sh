#!/usr/bin/env bash
# Runs the benchmarks, then makes README tables, figures and launch/bench/results/summary.json from their raw rows.
# Usage: bash launch/bench.sh [--cpu | --gpu | --report] [--only NAME]...
#   without an option: those without a GPU, and those with one where CUDA is present (the sizes are for 141 GB of HBM;
#                      the CPU ones take 17 GB of memory and one core to themselves)
#   --cpu, --gpu       only these
#   --report           no benchmark: the report from the rows that are there
#   --only NAME        only launch/bench/bench_NAME.py; may be given again
# PYTHON names an interpreter that has torch for this machine; else launch/setup.sh makes .venv (torch for CPU).
# A benchmark that fails does not stop the others; the status is 1 then.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cpu=1 gpu=auto only='' asked=''
names() { (cd launch/bench && printf '%s ' bench_*.py) | sed 's/bench_//g; s/\.py//g; s/ $//'; }
while [ $# -gt 0 ]; do
  case $1 in
    --cpu | --gpu | --report) asked="$asked $1" ;;
    --only)
      case ${2:-} in
        '' | -*) echo "bench: --only wants the NAME of launch/bench/bench_NAME.py: $(names)" >&2; exit 2 ;;
      esac
      only="$only $2"
      shift
      ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' launch/bench.sh; exit 0 ;;
    *) echo "bench: unknown option $1; bash launch/bench.sh --help" >&2; exit 2 ;;
  esac
  shift
done
if [ -n "$asked" ]; then
  cpu=0 gpu=0
  case $asked in *--cpu*) cpu=1 ;; esac
  case $asked in *--gpu*) gpu=1 ;; esac
fi
for name in $only; do
  [ -f "launch/bench/bench_$name.py" ] || { echo "bench: there is no launch/bench/bench_$name.py; NAME is one of: $(names)" >&2; exit 2; }
done

if [ -z "${PYTHON:-}" ]; then
  bash launch/setup.sh
  PYTHON=.venv/bin/python
fi
cuda() { "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }
if [ "$gpu" = auto ]; then
  gpu=0
  ! cuda || gpu=1
elif [ "$gpu" = 1 ] && ! cuda; then
  echo "bench: $PYTHON finds no CUDA device; set PYTHON= to an interpreter whose torch does, or use --cpu" >&2
  exit 2
fi

failed='' ran=0
# bench NAME [arguments]: one benchmark, if it exists and was asked for.
bench() {
  local name=$1 at=$SECONDS
  shift
  [ -f "launch/bench/bench_$name.py" ] || return 0
  case " ${only:-$name} " in *" $name "*) ;; *) return 0 ;; esac
  ran=1
  echo "bench: $name $*"
  if "$PYTHON" -m "launch.bench.bench_$name" "$@"; then
    echo "bench: $name took $((SECONDS - at)) s"
  else
    echo "bench: $name failed with status $?" >&2
    failed="$failed $name"
  fi
}

needs_no_gpu='plan deltas payload cpu'
if [ "$cpu" = 1 ]; then
  OMP_NUM_THREADS=1 bench plan
  OMP_NUM_THREADS=1 bench deltas
  OMP_NUM_THREADS=1 bench payload
  OMP_NUM_THREADS=1 bench cpu nbytes=8000000000
fi
if [ "$gpu" = 1 ]; then
  for script in launch/bench/bench_*.py; do
    name=${script#launch/bench/bench_}
    case " $needs_no_gpu one_queue " in *" ${name%.py} "*) ;; *) bench "${name%.py}" ;; esac
  done
  if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" -ge 2 ]; then bench peers --nvlink; fi
  CUDA_DEVICE_MAX_CONNECTIONS=1 bench one_queue
  CUDA_DEVICE_MAX_CONNECTIONS=1 bench trainer out=launch/bench/results/trainer-gpu-connections1.jsonl
fi

if [ -n "$only" ] && [ "$ran" = 0 ]; then
  echo "bench: none of$only was run: they need what --cpu, --gpu or this machine leaves out" >&2
  exit 2
fi
"$PYTHON" -m launch.bench.report
if [ -n "$failed" ]; then
  echo "bench: failed:$failed" >&2
  exit 1
fi

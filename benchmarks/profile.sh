#!/usr/bin/env bash
# Record a timeline, or the counters of kernels, of one case on several ranks of this host:
#
#   bash benchmarks/profile.sh [nsys|ncu|torch] CASE [--world N] [--out DIR] [--kernel REGEX] [-- OPTIONS]
#
# CASE: all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, ring_attention, mlp or decode (see
# profile_case.py; OPTIONS, such as --tokens 8192, go to it). FUSED_TP_SCHEDULE chooses the schedule, as everywhere.
#   nsys   a report for each rank: CUDA, NVTX (ops by shapes and schedule, chunks), libraries, nodes of CUDA graphs
#   ncu    all counters of up to 8 kernels of rank 0 whose name matches --kernel
#   torch  a Chrome trace per rank and one of all, for chrome://tracing or ui.perfetto.dev; needs no tool and no GPU
# Without a mode: nsys if it is installed and there is a GPU, else torch.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHON="${PYTHON:-$(command -v python || command -v python3)}"

die() {
  echo "profile.sh: $1" >&2
  exit 2
}

usage() {
  sed -n '2,12s/^# \{0,1\}//p' "benchmarks/profile.sh"
}

has() {
  command -v "$1" > /dev/null 2>&1
}

has_gpu() {
  has nvidia-smi && nvidia-smi --list-gpus > /dev/null 2>&1
}

# Sampling a GPU's units needs a privilege that drivers grant to root only, unless configured otherwise.
may_sample_gpu() {
  [ "$(id -u)" = 0 ] || grep -qs 'RmProfilingAdminOnly: 0' /proc/driver/nvidia/params
}

# One rank under nsys: torchrun runs this script again for each rank.
if [ "${1:-}" = --nsys-rank ]; then
  out=$2
  shift 2
  metrics=()
  # One sampler per GPU: if ranks share one, only the first of them samples it.
  gpus=$(nvidia-smi --list-gpus | wc -l)
  if may_sample_gpu && [ "$LOCAL_RANK" -lt "$gpus" ]; then
    case "$(nsys profile --help 2>&1)" in
      *--gpu-metrics-devices*) metrics=("--gpu-metrics-devices=$LOCAL_RANK") ;;
      *--gpu-metrics-device*) metrics=("--gpu-metrics-device=$LOCAL_RANK") ;;
    esac
  fi
  exec nsys profile --trace=cuda,nvtx,osrt --cuda-graph-trace=node --sample=none --cpuctxsw=none \
    --capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true --output="$out.rank$RANK" \
    "${metrics[@]+"${metrics[@]}"}" "$PYTHON" -m benchmarks.profile_case "$@"
fi

mode=
case "${1:-}" in
  nsys | ncu | torch)
    mode=$1
    shift
    ;;
  "" | -h | --help)
    usage
    exit 0
    ;;
esac
[ $# -gt 0 ] || die "no case is named; --help lists the cases"
name=$1
shift
world=2
out=out/profile
kernel=.
while [ $# -gt 0 ]; do
  case "$1" in
    --world | --out | --kernel)
      [ $# -gt 1 ] || die "$1 needs a value"
      case "$1" in
        --world) world=$2 ;;
        --out) out=$2 ;;
        --kernel) kernel=$2 ;;
      esac
      shift 2
      ;;
    --)
      shift
      break
      ;;
    *) die "unknown option $1; put options of the case after --" ;;
  esac
done
[[ $world =~ ^[1-9][0-9]*$ ]] || die "--world is $world; it must be a number of ranks"

if [ -z "$mode" ]; then
  if has nsys && has_gpu; then mode=nsys; else mode=torch; fi
  echo "profile.sh: using the mode $mode, because none is named"
fi
if [ "$mode" != torch ]; then
  has "$mode" || die "$mode is not installed; install it or use the mode torch"
  has_gpu || die "$mode profiles GPUs, and this machine has none; the mode torch needs no GPU"
fi

mkdir -p "$out"
# Ranks may share a GPU, which torch must be told to allow.
export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
ranks=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$world")
case "$mode" in
  nsys)
    "${ranks[@]}" --no-python bash benchmarks/profile.sh --nsys-rank "$out/$name" "$name" "$@"
    ls "$out/$name".rank*
    ;;
  ncu)
    # ncu cannot replay a single kernel that waits for other ranks: its signals have already been consumed. So all ranks
    # run again for each set of counters, and ncu profiles rank 0, in the NVTX range that it opens.
    replay=application
    [ "$world" = 1 ] && replay=kernel
    ncu --set full --target-processes all --replay-mode "$replay" --clock-control none \
      --nvtx --nvtx-include "profiled/" --kernel-name "regex:$kernel" --launch-count 8 \
      --force-overwrite --export "$out/$name" \
      "${ranks[@]}" -m benchmarks.profile_case "$name" --steps 1 "$@"
    echo "$out/$name.ncu-rep"
    ;;
  torch)
    rm -f "$out/$name".rank*.json
    "${ranks[@]}" -m benchmarks.profile_case "$name" --trace "$out" "$@"
    traces=()
    for ((rank = 0; rank < world; rank++)); do traces+=("$out/$name.rank$rank.json"); done
    "$PYTHON" -m benchmarks.profile_case --merge "$out/$name.json" "${traces[@]}"
    ls "${traces[@]}" "$out/$name.json"
    ;;
esac

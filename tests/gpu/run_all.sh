#!/usr/bin/env bash
# Every check that needs a GPU: `bash tests/gpu/run_all.sh [FOLDER [NAME...]]`. The printed output of each
# goes to FOLDER/gpu-NAME.txt (default docs/evidence) and to the terminal. Needs an NVIDIA device, torch,
# and what the others import: tensorflow, jax, cupy, onnxruntime. Ends with 1 if any check failed. Each output
# names the commit: where there is no git repository, set PREFECT_GPU_COMMIT.
#
# All of them take about fifty minutes on an H200. Where a call may take ten minutes, in five:
#   run_all.sh FOLDER bookkeeping host-memory main-job frameworks ladder
#   run_all.sh FOLDER resnet prediction sampler sessions escapes sharing several-devices
#   run_all.sh FOLDER libraries changing-sizes jax-context ways reports
#   run_all.sh FOLDER cluster leaks spawned torch-tools reset profile-training least-memory many-flows suspension suspend-by-hand crowded
#   run_all.sh FOLDER forks estimates work mps
# and three more for `tests` and `chaos`, which are five minutes each, and for `preemption`, which is six and what it waits for at the
# end. The faults of preemption are `python -m tests.gpu.check_preemption --faults`, three minutes; how soon an urgent task has a device is
# `python benchmarks/preempt.py`, four minutes, and `--between-devices` as many on two devices. A name such as `test_steps_on_gpu` is one
# file of tests. `cluster` needs Ray, and two devices as `several-devices` does; `libraries` and `changing-sizes` need what they name: timm, torchvision, transformers, lightning,
# accelerate, torch-geometric, flax, optax. What is missing is left out, and said. `libraries=timm,flax` tries these two only.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-docs/evidence}
shift || true
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PREFECT_SERVER_ANALYTICS_ENABLED=false PREFECT_HOME=${PREFECT_HOME:-$PWD/.prefect}
flows="profile-training"
runs="chaos preemption least-memory"
modules="bookkeeping host-memory main-job frameworks ladder resnet prediction sampler sessions escapes sharing several-devices cluster"
modules+=" libraries changing-sizes estimates work mps jax-context ways reports leaks spawned torch-tools reset many-flows suspension suspend-by-hand crowded forks"
[[ $# -gt 0 ]] || set -- $modules $flows $runs tests
for name; do
  [[ " $modules $flows $runs tests " == *" ${name%%=*} "* || -f tests/gpu/$name.py ]] || { echo "no check is called $name; there are: $modules $flows $runs tests"; exit 2; }
done
release=$(PYTHONPATH=benchmarks "$python" -c 'import _common; print("{}, commit {}".format(*_common.release()))') || exit
device=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n1 | sed 's/, /, driver /') || device="device not recorded"
failed=0
check() {
  local file=$out/$1.txt
  shift
  { echo "# prefect-gpu $release; $device; $(date -I)"; echo "\$ $*"; echo "prefect-gpu $release"; "$@" 2>&1; } \
    | sed -u 's/\x1b\[[0-9;]*m//g' \
    | grep -v --line-buffered "oneDNN custom\|absl::InitializeLog\|cpu_feature_guard\|rebuild TensorFlow\|^$\|:onnxruntime:" \
    | tee "$file"
  local code=${PIPESTATUS[0]}
  [[ $code == 0 ]] || { failed=1; echo "FAILED with $code: $*" | tee -a "$file"; }
}
for name; do
  if [[ $name == tests ]]; then
    check gpu-tests "$python" -m pytest -p no:cacheprovider -m gpu tests/gpu
  elif [[ $name == test_* ]]; then
    check "gpu-$name" "$python" -m pytest -p no:cacheprovider -m gpu "tests/gpu/$name.py"
  elif [[ $name == chaos ]]; then
    check gpu-chaos "$python" -m tests.chaos --seed 1 --seconds 300 --flows 4 --devices nvml
  elif [[ $name == preemption ]]; then
    check gpu-preemption "$python" -m tests.gpu.check_preemption --minutes 6
  elif [[ $name == least-memory ]]; then
    check gpu-least-memory "$python" flows/profile_training.py --least
  elif [[ " $flows " == *" $name "* ]]; then
    check "gpu-$name" "$python" "flows/${name//-/_}.py"
  else
    only=()
    [[ $name != *=* ]] || for part in $(tr , ' ' <<<"${name#*=}"); do only+=(--only "$part"); done
    module=${name%%=*}
    check "gpu-${name//[=,]/-}" "$python" -m "tests.gpu.check_${module//-/_}" "${only[@]}"
  fi
done
exit $failed

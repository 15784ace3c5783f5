#!/usr/bin/env bash
# Every check that needs a GPU, in one call: `bash tests/gpu/run_all.sh [FOLDER]`. Its printed output
# goes to FOLDER (default docs/evidence) and to the terminal. Needs an NVIDIA device, torch, and
# tensorflow for the main job. Ends with 1 if any check failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-docs/evidence}
python=${PYTHON:-python3}
mkdir -p "$out"
export PREFECT_SERVER_ANALYTICS_ENABLED=false PREFECT_HOME=${PREFECT_HOME:-$PWD/.prefect}
failed=0
check() {
  local file=$out/$1.txt
  shift
  { echo "\$ $*"; "$@" 2>&1; } | grep -v --line-buffered "oneDNN custom\|absl::InitializeLog\|cpu_feature_guard\|rebuild TensorFlow" | tee "$file"
  local code=${PIPESTATUS[0]}
  [[ $code == 0 ]] || { failed=1; echo "FAILED with $code: $*" | tee -a "$file"; }
}
check gpu-bookkeeping "$python" -m tests.gpu.check_bookkeeping
check gpu-host-memory "$python" -m tests.gpu.check_host_memory
check gpu-main-job "$python" -m tests.gpu.check_main_job
check gpu-tests "$python" -m pytest -p no:cacheprovider -m gpu tests/gpu
exit $failed

#!/usr/bin/env bash
# Start a process worker in a container: `entry.sh [OPTIONS OF prefect worker start]`.
#
#   PREFECT_API_URL                   of the server; required
#   WORK_POOL                         of type process; default: gpu-pool
#   PREFECT_HOME                      Prefect's files and reports that wait; default: /var/lib/prefect
#   PREFECT_INTEGRATIONS_GPU_LEDGER   what the flows of all containers of the machine share; default: /ledger, a volume
#   PREFECT_INTEGRATIONS_GPU_DEVICES  which devices; default: all that the container sees
set -euo pipefail

if [[ -z "${PREFECT_API_URL:-}" ]]; then
    echo "entry.sh: set PREFECT_API_URL to the API of a Prefect server, as in http://prefect-server:4200/api" >&2
    exit 2
fi
export PREFECT_HOME="${PREFECT_HOME:-/var/lib/prefect}"
export PREFECT_INTEGRATIONS_GPU_LEDGER="${PREFECT_INTEGRATIONS_GPU_LEDGER:-/ledger}"
# The ledger only joins containers that mount one folder of the machine there.
mkdir -p "$PREFECT_HOME" "$PREFECT_INTEGRATIONS_GPU_LEDGER"

# PyTorch's `DataLoader` passes batches through /dev/shm, of which a container has 64 MiB unless it is given more.
shm_mib=$(df --block-size=1M --output=size /dev/shm | tail -1 | tr -d ' ')
if ((shm_mib < 1024)); then
    echo "entry.sh: /dev/shm holds ${shm_mib} MiB; DataLoaders with workers need more: docker run --shm-size=8g" >&2
fi

exec prefect worker start --pool "${WORK_POOL:-gpu-pool}" --type process --name "$(hostname)" "$@"

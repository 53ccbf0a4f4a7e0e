#!/bin/bash
# Trains on several machines, by torchrun alone. Run it on each machine, with the same HEAD:
#
#     HEAD=node0 NODES=1:2 RANKS=8 bash examples/cluster/torchrun.sh --model /nvme/llama --dir /shared/run
#
# Between one and two machines may take part. When a rank is killed or a machine is lost, torchrun
# starts all ranks again, and they go on from the last commit, on as many ranks as there are then.
# Every machine must see --dir.
set -euo pipefail
# Else torchrun gives restarted ranks the addresses of the ranks that have ended (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
: "${HEAD:?the name of one of the machines, the same on all}"

exec torchrun \
  --nnodes "${NODES:-2}" --nproc-per-node "${RANKS:-8}" --max-restarts "${RESTARTS:-100}" \
  --rdzv-id "${JOB:-tensorstow}" --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" \
  examples/several_ranks.py "$@"

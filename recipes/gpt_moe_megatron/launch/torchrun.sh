#!/usr/bin/env bash
# Train on the processes of this machine, and go on by itself when one of them dies.
#   recipes/gpt_moe_megatron/launch/torchrun.sh [overrides ...]
#   NPROC=8 recipes/gpt_moe_megatron/launch/torchrun.sh trainer=gpu parallel=node8_ep8
#   LOGS=logs  what the processes write to stderr goes there, one file each: tracebacks of those whose peer died
set -euo pipefail
cd "$(dirname "$0")/../../.."

# After kill -9 of a rank, gloo reads addresses of the dead processes from the shared rendezvous store, and about
# every second restart fails (pytorch#135712, #167288). With a store of its own for each start it does not.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node="${NPROC:-4}" \
  --max-restarts="${MAX_RESTARTS:-20}" ${LOGS:+--redirects=2 --log-dir="$LOGS"} recipes/gpt_moe_megatron/train.py "$@"

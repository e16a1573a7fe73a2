#!/usr/bin/env bash
# Train on the processes of this machine, and go on by itself when one of them dies.
#   NPROC=2 recipes/gpt_moe_lightning/launch/torchrun.sh [overrides ...]
set -euo pipefail
cd "$(dirname "$0")/../../.."

# A store of its own for each start: in a shared one ranks find addresses of dead processes, and most restarts after
# kill -9 fail (pytorch#135712). It has an effect with --standalone or --rdzv-backend=c10d, none with --master-port.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node="${NPROC:-2}" \
  --max-restarts="${MAX_RESTARTS:-20}" -m recipes.gpt_moe_lightning.train "$@"

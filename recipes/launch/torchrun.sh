#!/usr/bin/env bash
# Trains on the processes of this machine, and starts them again when one dies.
#   recipes/launch/torchrun.sh PROGRAM [words]       NPROC=8  MAX_RESTARTS=20
#   LOGS=logs   what the processes write to stderr goes there, one file each: tracebacks of those whose peer died
set -euo pipefail

# A store of its own for each start: in a shared one ranks find addresses of dead processes, and most restarts after
# kill -9 fail (pytorch#135712). It has an effect with --standalone or --rdzv-backend=c10d, none with --master-port.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"


# Processes with @record (torchtitan's) write their error into a file for torchrun. One that torchrun ends while it writes
# leaves half a file, at which torchrun fails instead of starting all again. So they are not told of a file: the traceback
# is on stderr anyway.
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node="${NPROC:-4}" \
  --max-restarts="${MAX_RESTARTS:-20}" ${LOGS:+--redirects=2 --log-dir="$LOGS"} \
  --no-python env -u TORCHELASTIC_ERROR_FILE "${PYTHON:-python}" -u "$@"

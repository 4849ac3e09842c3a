#!/bin/bash
# One host's share of a run, for what starts containers or machines: torchrun, and an exit code that says what is to be done next.
#
#   HOSTS=2 HEAD=first-host RANKS=8 scripts/host.sh model=llama3_8b parallel=hsdp batch_sequences=512 out=/runs
#
# HEAD: the name or address of the first of them, where the ranks meet at PORT; not needed for one host. MIN_HOSTS: so many may go on
# without the others.
# 0: the run is finished. 75: it is to be started again, on all hosts. 2: it was refused. 1: it failed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
hosts=${HOSTS:-1} ranks=${RANKS:-1} torchrun=

# It may be the first process of a container, which gets signals that it has no trap for as little as its children do.
trap '[ -z "$torchrun" ] || kill -TERM "$torchrun"' TERM INT
trap '[ -z "$torchrun" ] || kill -USR1 "$torchrun"' USR1

asked=$("$python" -m scripts.job words "$hosts" "$ranks" "$@")
mapfile -t lines <<<"$asked"
folder=${lines[0]} checkpoint=${lines[1]} words=("${lines[@]:2}")

# Seconds that torchrun waits for ranks that save. From torch 2.12 on; before it is always 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

# Otherwise torchrun tells its address in the first round alone, and a host that is replaced later waits for it in vain (2.11, 2.15).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
meet=(--standalone)
if [ "$hosts" != 1 ]; then
  meet=(--nnodes="${MIN_HOSTS:-$hosts}:$hosts" --rdzv-backend=c10d --rdzv-endpoint="$HEAD:${PORT:-29400}" --rdzv-id=espalier)
fi
"$python" -m torch.distributed.run "${meet[@]}" --nproc-per-node="$ranks" --max-restarts=3 \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 train.py "${words[@]}" &
torchrun=$!
while kill -0 "$torchrun" 2>/dev/null; do wait "$torchrun" || true; done # a signal ends a wait, not torchrun

case $("$python" -m scripts.job outcome "$folder" "$checkpoint") in
finished) ;;
again | stopped) exit 75 ;;
*) exit 1 ;;
esac

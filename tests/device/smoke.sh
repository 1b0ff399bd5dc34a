#!/usr/bin/env bash
# Five minutes on a machine with one NVIDIA GPU: NCCL with a world of one, bfloat16, pinned batches, and
# a killed run that resumes bit for bit, for every strategy. Does nothing where there is no GPU.
# PYTHON names the interpreter that has vitra and a CUDA build of torch; .venv's by default.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "skipped: torch sees no CUDA device here"
    exit 0
fi
"$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name(0))'
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec timeout 600 "$python" -m tests.device.smoke

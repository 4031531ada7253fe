#!/usr/bin/env bash
# Everything that a GPU can tell about jprefill, in 8 minutes: numerics, speed and memory, next to PyTorch.
# Usage: bench/gpu/run.sh [--tiny] [--out DIR] ...     --help lists the rest; --tiny runs small on a CPU
# Works on the source tree as it is: no installation, no network. The interpreter needs jax (with CUDA), numpy,
# jaxtyping and tqdm; PyTorch is the peer, where it is there.
#   JPREFILL_PYTHON   the interpreter (default: python3)
#   JPREFILL_WHEELS   a folder of wheels for what that interpreter lacks
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec "${JPREFILL_PYTHON:-python3}" -m bench.gpu.main "$@"

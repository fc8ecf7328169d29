#!/usr/bin/env bash
# The GPU checks: same bytes on the device as on the host, then both benchmarks. Run it on a machine with a CUDA GPU,
# from the repository's root:
#
#     bash tests/bench/gpu.sh [OUTPUT_FOLDER]
#
# It takes the Python of .venv, or the one that PYTHON names; that needs torch for CUDA and Stretto's dependencies. Results
# are JSON files in the output folder; quote them in docs/log.md with the date and the device. It ends in about ten
# minutes and leaves the GPU's settings as they are.
set -euo pipefail
cd "$(dirname "$0")/../.."
out="${1:-gpu-report}"
python="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
mkdir -p "$out"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=4

"$python" -c '
import json, sys
try:
    import torch
except ImportError:
    sys.exit(f"{sys.executable} has no torch: run `make test` once, or name another Python with PYTHON=...")
if not torch.cuda.is_available():
    sys.exit("no CUDA device is visible to torch: this script measures GPUs only")
print(json.dumps({"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda}))
' | tee "$out/device.json"

echo "== the codec gives the same bytes on the device"
"$python" tests/bench/gpu_codec.py | tee "$out/codec_device.json"

echo "== codec on the host of this machine"
"$python" -m stretto.node.cli bench codec --json | tee "$out/codec_host.json"

echo "== training with and without synchronization"
"$python" -m stretto.node.cli bench step --json --device cuda --threads 4 --blocks 6 --steps 40 | tee "$out/step.json"

echo "done: results in $out"

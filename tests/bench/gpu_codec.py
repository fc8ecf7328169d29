"""The E3M0 codec on a CUDA device: the same bytes and sums as on the host, and its speed. Prints one JSON object.

Run by ``tests/bench/gpu.sh``. Fails with exit code 1 if a single byte differs.
"""

import json
import sys
import time
from statistics import median

import numpy as np
import torch

from stretto.protocol import fp4, fp4_torch

SIZES = (0, 1, 255, 256, 257, 1_000_003, 64_000_000)
RUNS = 9


def values(n: int) -> np.ndarray:
    """Random normals with an outlier in each tenth block, zeros, subnormals and ties."""
    random = np.random.default_rng(n)
    x = random.normal(0, 1e-3, n).astype(np.float32)
    x[::2560] *= 100
    x[1::97], x[2::101], x[3::103] = 0.0, 1e-40, 1.5 * 2.0**-9
    return x


def seconds(call: object) -> float:
    """Median time of ``call()``, device included."""
    times = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()  # type: ignore[operator]
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times)


def main() -> int:
    """Compare, then time."""
    device = torch.device("cuda")
    for n in SIZES:
        x = values(n)
        payload = fp4.encode(x)
        if fp4_torch.encode(torch.from_numpy(x).to(device)) != payload:
            print(json.dumps({"same_bytes": False, "size": n}))
            return 1
        host, there = np.ones(n, dtype=np.float32), torch.ones(n, device=device)
        fp4.decode_add(payload, 0.3, host)
        fp4_torch.decode_add(payload, 0.3, there)
        if there.cpu().numpy().tobytes() != host.tobytes():
            print(json.dumps({"same_sums": False, "size": n}))
            return 1
    n = SIZES[-1]
    there, x = torch.from_numpy(values(n)).to(device), values(n)
    payload, total, host = fp4.encode(x), torch.zeros(n, device=device), np.zeros(n, dtype=np.float32)
    gigabytes = 4 * n / 1e9
    print(
        json.dumps(
            {
                "same_bytes": True,
                "same_sums": True,
                "floats": n,
                "device_encode_gb_per_s": gigabytes / seconds(lambda: fp4_torch.encode(there)),
                "device_decode_add_gb_per_s": gigabytes / seconds(lambda: fp4_torch.decode_add(payload, 0.3, total)),
                "copy_to_host_gb_per_s": gigabytes / seconds(lambda: there.cpu()),
                "host_path": fp4.path_name(),
                "host_encode_gb_per_s": gigabytes / seconds(lambda: fp4.encode(x)),
                "host_decode_add_gb_per_s": gigabytes / seconds(lambda: fp4.decode_add(payload, 0.3, host)),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

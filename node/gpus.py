"""Cards that people have at home or rent: memory, and the FLOP/s that training is assumed to sustain on them.

The assumption for all is half of the dense 16-bit tensor peak with FP32 accumulation, which stands beside each card as
the vendor's data sheet or architecture paper gives it. Evidence is thin: public reports of small GPT models lie
between 13 % of an H100's peak (nanochat, 561M: 133 TFLOP/s) and 29 % of an A100's (nanoGPT, 124M: 90 TFLOP/s). So
take half as what a good implementation may reach. For another card, or a figure of one's own, there are ``--tflops``
and ``--memory``; for this machine ``--measure``.
"""

from dataclasses import dataclass

from stretto.protocol.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """One card: TFLOP/s that training is assumed to sustain, and memory in GB (10^9 bytes, rounded down)."""

    name: str
    tflops: float
    memory_gb: float


GPUS: dict[str, Gpu] = {
    # GeForce, Ampere: peaks from NVIDIA's GA102 paper, for the smaller chips by its ratio of tensor to FP32 peak
    "3060": Gpu("RTX 3060", 13, 12),  # 25.5
    "3070": Gpu("RTX 3070", 20, 8),  # 40.6
    "3080": Gpu("RTX 3080", 30, 10),  # 59.5
    "3090": Gpu("RTX 3090", 35, 24),  # 71
    # GeForce, Ada: NVIDIA's Ada paper
    "4060ti": Gpu("RTX 4060 Ti 16 GB", 22, 16),  # 44.1
    "4070": Gpu("RTX 4070", 29, 12),  # 58.3
    "4080": Gpu("RTX 4080", 49, 16),  # 97.5
    "4090": Gpu("RTX 4090", 83, 24),  # 165.2
    # GeForce, Blackwell: NVIDIA's RTX Blackwell paper
    "5080": Gpu("RTX 5080", 56, 16),  # 112.6
    "5090": Gpu("RTX 5090", 105, 32),  # 209.5
    # Radeon: AMD's product page, matrix FP16
    "7900xtx": Gpu("RX 7900 XTX", 61, 24),  # 122.8
    # workstation and data centre: NVIDIA's data sheets, without sparsity
    "t4": Gpu("T4", 32, 16),  # 65
    "a6000": Gpu("RTX A6000", 77, 48),  # 154.8
    "l40s": Gpu("L40S", 181, 48),  # 362
    "a100": Gpu("A100 80 GB", 156, 80),  # 312
    "h100": Gpu("H100 SXM", 495, 80),  # 989
    "h200": Gpu("H200", 495, 141),  # 989
}


def find_gpu(name: str) -> Gpu:
    """The card of that name, with or without ``RTX`` and blanks. ConfigError lists the names that are known."""
    key = name.lower().replace(" ", "").replace("-", "").removeprefix("rtx").removeprefix("rx")
    if key not in GPUS:
        raise ConfigError(
            f"no card {name!r} in the table; there are {', '.join(GPUS)}. For another one give --tflops (sustained in "
            "training, about half of its dense 16-bit peak) and --memory (GB)"
        )
    return GPUS[key]

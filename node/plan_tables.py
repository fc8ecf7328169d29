"""``stretto plan --tables``: what a volunteer's line and card can do, for all sizes of the paper's family of models.

Both tables take an RTX 4090 at 83 TFLOP/s and 4.125 bits per value (E3M0 with a 16-bit scale per 128 values) in both
directions, so that they compare with other work; what a real run of Stretto costs is asked with ``--model``.
"""

from dataclasses import dataclass
from typing import Any

from stretto.protocol.planner.home import (
    MBIT,
    STATE_BYTES_8BIT,
    Machine,
    Plan,
    Recipe,
    Scheme,
    equal_fragments,
    exchange_bits,
    make_plan,
    needed_uplink,
)

FLOPS = 83e12
MEMORY = 24e9
BITS = 4.125
VOCABULARY = 32_000
TOKENS_PER_STEP = 65_536
INNER_STEPS = 100
FRAGMENTS = 20
LINKS = ((20.0, 10.0), (100.0, 20.0), (1000.0, 1000.0))
"""Down and up, Mbit/s."""
UPLINK_ROWS = ((32_768, 100), (65_536, 100), (65_536, 200), (131_072, 100), (131_072, 500))
"""K and H."""
UPLINK_COLUMNS: tuple[tuple[str, Scheme, int, float], ...] = (
    ("pair or client", "pair", 2, BITS),
    ("butterfly M=8", "butterfly", 8, BITS),
    ("butterfly M=64", "butterfly", 64, BITS),
    ("all-gather M=4", "all-gather", 4, BITS),
    ("all-gather M=8", "all-gather", 8, BITS),
    ("butterfly M=8, 2.25 bit", "butterfly", 8, 2.25),
)


@dataclass(frozen=True)
class Size:
    """A member of the paper's family: L layers, width d, a plain MLP of 4 d, tied embeddings."""

    layers: int
    width: int

    @property
    def parameters(self) -> int:
        """12 L d^2 + 32,000 d."""
        return 12 * self.layers * self.width**2 + VOCABULARY * self.width


SIZES = {
    "35M": Size(6, 512),
    "88M": Size(9, 768),
    "184M": Size(12, 1024),
    "336M": Size(15, 1280),
    "559M": Size(18, 1536),
    "1.27B": Size(24, 2048),
    "2.44B": Size(30, 2560),
    "4.17B": Size(36, 3072),
    "9.8B": Size(48, 4096),
}


def uplink_table() -> list[dict[str, Any]]:
    """Mbit/s of uplink with which everything just hides, whatever the size of the model."""
    rows = []
    for tokens, steps in UPLINK_ROWS:
        row: dict[str, Any] = {"tokens_per_step": tokens, "inner_steps": steps}
        for name, scheme, group, bits in UPLINK_COLUMNS:
            up, _ = exchange_bits(scheme, group, bits, bits)
            row[name] = needed_uplink(FLOPS, tokens * steps, up) / MBIT
        rows.append(row)
    return rows


def plan_for(size: Size, link: tuple[float, float], *, peers: int = 8) -> Plan:
    """One model on one line, as in both tables below."""
    recipe = Recipe(
        fragments=equal_fragments(size.parameters, FRAGMENTS),
        tokens_per_step=TOKENS_PER_STEP,
        inner_steps=INNER_STEPS,
        group=8,
        swarm=peers,
        up_bits=BITS,
        down_bits=BITS,
        scheme="butterfly",
        tau_max=5,
    )
    machine = Machine(flops=FLOPS, memory=MEMORY, down=link[0] * MBIT, up=link[1] * MBIT)
    return make_plan(recipe, machine)


def size_table() -> list[dict[str, Any]]:
    """Time, bytes and memory of each size."""
    rows = []
    for name, size in SIZES.items():
        plan = plan_for(size, LINKS[-1])
        row: dict[str, Any] = {
            "model": name,
            "parameters": size.parameters,
            "step_seconds": plan.step_seconds,
            "round_seconds": plan.round_seconds,
            "bytes_per_round": plan.bytes_up,
            "device_bytes": plan.state_bytes,
            "device_bytes_8bit_adam": STATE_BYTES_8BIT * size.parameters,
            "host_bytes": plan.host_bytes,
            "days_8_peers": plan.days,
            "days_32_peers": plan_for(size, LINKS[-1], peers=32).days,
        }
        for link in LINKS:
            there = plan_for(size, link)
            row[f"join_seconds_bf16_{link[0]:g}"] = there.join_seconds(2)
            row[f"join_seconds_exact_{link[0]:g}"] = there.join_seconds()
        rows.append(row)
    return rows


def link_table() -> list[dict[str, Any]]:
    """Each line, for any of the sizes."""
    rows = []
    for link in LINKS:
        plan = plan_for(SIZES["1.27B"], link)
        rows.append(
            {
                "link": f"{link[0]:g}/{link[1]:g}",
                "rho": plan.rho,
                "tau": plan.tau if plan.rate_fits else None,
                "compute_utilization": plan.utilization,
            }
        )
    return rows


def tables() -> dict[str, Any]:
    """All three as plain values."""
    return {"uplink": uplink_table(), "sizes": size_table(), "links": link_table()}


def render_tables(found: dict[str, Any]) -> str:
    """The tables for people."""
    columns = [name for name, *_ in UPLINK_COLUMNS]
    lines = ["Uplink in Mbit/s that hides everything, any model, RTX 4090 (83 TFLOP/s), 4.125 bits per value:", ""]
    lines.append(f"{'K':>8} {'H':>4}" + "".join(f"{name:>{len(name) + 2}}" for name in columns))
    for row in found["uplink"]:
        numbers = "".join(f"{row[name]:>{len(name) + 2}.1f}" for name in columns)
        lines.append(f"{row['tokens_per_step']:>8,} {row['inner_steps']:>4}{numbers}")
    lines += [
        "",
        f"Sizes: K = {TOKENS_PER_STEP:,}, H = {INNER_STEPS}, butterfly of 8, {FRAGMENTS} equal fragments; memory with "
        "Adam in FP32 / 8 bits;",
        "join in minutes with bf16 weights / the exact state, by Mbit/s down; days until 20 tokens per parameter",
        "",
        f"{'model':>6}{'step s':>8}{'round':>10}{'GB/round':>10}{'device GB':>13}{'host GB':>9}"
        f"{'join 20':>13}{'join 100':>13}{'join 1000':>13}{'8 peers':>9}{'32':>7}",
    ]
    for row in found["sizes"]:
        join = "".join(
            f"{row[f'join_seconds_bf16_{down:g}'] / 60:>6.1f} /{row[f'join_seconds_exact_{down:g}'] / 60:>5.1f}"
            for down, _ in LINKS
        )
        lines.append(
            f"{row['model']:>6}{row['step_seconds']:>8.2f}{row['round_seconds'] / 60:>6.1f} min"
            f"{row['bytes_per_round'] / 1e9:>10.3f}"
            f"{row['device_bytes'] / 1e9:>7.1f} /{row['device_bytes_8bit_adam'] / 1e9:>4.1f}"
            f"{row['host_bytes'] / 1e9:>9.1f}{join}{row['days_8_peers']:>9.2f}{row['days_32_peers']:>7.2f}"
        )
    lines += ["", "Lines (down/up Mbit/s), the same for every size:", ""]
    for row in found["links"]:
        tau = f"tau {row['tau']}" if row["tau"] else "does not keep up"
        lines.append(f"{row['link']:>10}  rho {row['rho']:.2f}  {tau}, CU {row['compute_utilization']:.2f}")
    return "\n".join(lines)

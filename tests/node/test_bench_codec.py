"""`stretto bench codec`: what the report holds, and that its ratios are those of its speeds; no speed is asserted."""

import json

import pytest

from stretto.node.bench import codec
from stretto.node.bench.codec import bench_codec
from stretto.protocol import fp4
from stretto.protocol.errors import ConfigError


def test_ratios_are_taken_within_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "WALK", 1 << 15)
    monkeypatch.setattr(codec, "SLOW", 1 << 13)
    report = json.loads(json.dumps(bench_codec(sizes=[5000, 20_001], runs=3)))
    assert [size["floats"] for size in report["sizes"]] == [5000, 20_001]
    for size in report["sizes"]:
        speed, ratios = size["gb_per_s"], size["ratios"]
        assert min(speed.values()) > 0
        best = speed[f"{report['best_path']}_encode"]
        assert ratios["encode_over_memcpy"] == best / speed["memcpy"]
        assert ratios["encode_over_limit"] == pytest.approx(ratios["encode_over_memcpy"] * 4.5 / 8)
        assert ratios["decode_add_over_limit"] == pytest.approx(ratios["decode_add_over_memcpy"] * 8.5 / 8)
        assert ratios["numpy_encode_over_uniform8bit"] == speed["numpy_encode"] / speed["uniform8bit_encode"]
        assert ratios["encode_over_float16"] == best / speed["float16_encode"]
    assert report["encode_over_limit"] == min(size["ratios"]["encode_over_limit"] for size in report["sizes"])
    assert report["paths"] == [*fp4.PATHS, "torch"]
    assert report["cpu"]
    assert (report["uniform8bit_extract"] == "works") == ("uniform8bit_decode_add" in report["sizes"][0]["gb_per_s"])
    assert fp4.path_name() == report["best_path"]


@pytest.mark.parametrize(("sizes", "runs"), [([], 1), ([255], 1), ([1 << 31], 1), ([4096], 0)])
def test_what_cannot_be_timed_is_refused(sizes: list[int], runs: int) -> None:
    with pytest.raises(ConfigError, match="bench codec takes sizes of 256"):
        bench_codec(sizes=sizes, runs=runs)

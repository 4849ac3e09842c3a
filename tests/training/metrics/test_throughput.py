import pytest

from training.metrics.throughput import mfu, no_peak, peak_flops

# Names as drivers give them; dense bf16 TFLOP/s of the makers' data sheets.
KNOWN = {
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA B200": 2250,
    "NVIDIA L40S": 362.05,
    "NVIDIA L4": 121,
    "NVIDIA A10": 125,
    "NVIDIA A40": 149.7,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    "AMD Instinct MI300X": 1307.4,
}
UNKNOWN = [
    "Intel(R) Xeon(R) Platinum 8488C",
    "cpu",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a seventh of a device
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    "NVIDIA A100-SXM-64GB",  # more cores than others
    "NVIDIA H100",  # SXM or PCIe?
    "NVIDIA A10G",
    "NVIDIA L40",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 3090 Ti",
]


@pytest.mark.parametrize(("name", "tera"), KNOWN.items())
def test_known_devices(name: str, tera: float) -> None:
    assert peak_flops(name, "bf16") == pytest.approx(tera * 1e12)


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_devices_are_not_guessed(name: str) -> None:
    assert peak_flops(name, "bf16") is None


def test_the_dtype_counts() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp64") is None
    assert peak_flops("Tesla V100-SXM2-16GB", "fp32") == 15.7e12
    assert peak_flops("Tesla V100-SXM2-16GB", "bf16") is None  # has none: no MFU rather than infinity


def test_mfu() -> None:
    # Palm's own figures (Chowdhery et al. 2022, table 3 and appendix B): 540B parameters, 238.3k tokens/s on 6144 TPU
    # v4 of 275 TFLOP/s bf16, 46.2 % with attention: 118 layers, 48 heads of 256, 2048 tokens.
    flops_per_token = 6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048
    assert mfu(238.3e3 / 6144, flops_per_token, 275e12) == pytest.approx(0.462, abs=0.002)
    assert mfu(1.0, 1.0, None) is None


def test_the_line_says_how_to_give_the_peak() -> None:
    assert "hardware.peak_tflops=" in no_peak("a processor", "fp32")

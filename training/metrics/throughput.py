"""How fast a device could compute, and how much of that a run uses. No torch here."""

import re

# Dense peaks (no structured sparsity) in TFLOP/s: name as the driver gives it -> bf16, tf32, fp32; 0: it has none.
# bf16 and tf32 are tensor-core rates with float32 accumulation, fp32 is that of the plain cores. Each from NVIDIA's
# data sheet or architecture white paper of the device (AMD's for the MI300 line), halved where the sheet counts
# sparsity.
PEAKS: list[tuple[str, float, float, float]] = [
    (r"GB200\b", 2500, 1250, 80),  # GB200 NVL72 data sheet, at 1,200 W
    (r"B200\b", 2250, 1100, 75),  # HGX B200 data sheet, at 1,000 W
    (r"H200 NVL\b", 835.5, 417.5, 60),  # H200 data sheet
    (r"H200\b", 989.4, 494.7, 66.9),  # H200 data sheet; the H100 SXM's chip
    (r"GH200\b", 989.4, 494.7, 66.9),  # GH200 data sheet; the same chip
    (r"H100 NVL\b", 835.5, 417.5, 60),  # H100 data sheet
    (r"H100 PCIe\b", 756, 378, 51),  # H100 data sheet
    (r"H100 (80GB HBM3|SXM5)\b", 989.4, 494.7, 66.9),  # H100 white paper, SXM5
    (r"H800 (80GB HBM3|SXM5)\b", 989.4, 494.7, 66.9),  # an H100 SXM with less NVLink
    # A100 data sheet; there are custom ones with more cores and 64 GB
    (r"A100[ -](SXM4-|PCIE-)?(40|80)GB", 312, 156, 19.5),
    (r"A800[ -](SXM4-|PCIE-)?(40|80)GB", 312, 156, 19.5),  # an A100 with less NVLink
    (r"A40\b", 149.7, 74.8, 37.4),  # A40 data sheet
    (r"A10\b", 125, 62.5, 31.2),  # A10 data sheet
    (r"RTX A6000\b", 154.8, 77.4, 38.7),  # GA102 white paper
    (r"RTX 6000 Ada Generation\b", 364.2, 182.1, 91.1),  # Ada white paper
    (r"L40S\b", 362.05, 183, 91.6),  # L40S data sheet
    (r"L4\b", 121, 60, 30.3),  # L4 data sheet
    (r"RTX 5090\b", 209.5, 104.8, 104.8),  # RTX Blackwell white paper
    (r"RTX 4090\b", 165.2, 82.6, 82.6),  # Ada white paper
    (r"RTX 3090\b", 71, 35.6, 35.6),  # GA102 white paper
    (r"V100-SXM[23]", 0, 0, 15.7),  # V100 data sheet
    (r"V100-PCIE", 0, 0, 14),
    (r"T4\b", 0, 0, 8.1),  # T4 data sheet
    (r"MI300X\b", 1307.4, 653.7, 163.4),  # MI300X data sheet
    (r"MI325X\b", 1307.4, 653.7, 163.4),  # MI325X data sheet
]


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak of one device in FLOP/s; None where it is not known, never a guess.

    device_name: as torch.cuda.get_device_name gives it. dtype: bf16 | tf32 | fp32.
    """
    if dtype not in ("bf16", "tf32", "fp32"):
        return None
    for pattern, *peaks in PEAKS:
        # What follows a name may only be its memory or form, not "Ti", "Laptop GPU", "D" or "MIG 1g.5gb".
        if re.fullmatch(
            rf"(NVIDIA |AMD |Tesla |GeForce |Instinct )*{pattern}([ -](\d+GB|PCIe|SXM\d?|HBM\de?|OAM))*", device_name
        ):
            tera = dict(zip(("bf16", "tf32", "fp32"), peaks, strict=True))[dtype]
            return tera * 1e12 or None
    return None


def mfu(tokens_per_second_per_device: float, flops_per_token: float, peak: float | None) -> float | None:
    """Model FLOPs utilization (Chowdhery et al. 2022): the FLOPs the model needs, forward and backward, over the
    device's peak. What is computed twice to save memory is not counted. None where the peak is not known."""
    return None if peak is None else tokens_per_second_per_device * flops_per_token / peak


def no_peak(device_name: str, dtype: str) -> str:
    """The line that says how to get an MFU."""
    return (
        f"no MFU: the {dtype} peak of {device_name} is not known; "
        f"give the dense peak of one device in TFLOP/s: hardware.peak_tflops=..."
    )

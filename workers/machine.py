"""What this machine is good at, asked without importing torch (seconds) unless a GPU's driver is there."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

#: Files that show a GPU's driver; without one, torch need not be asked.
GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
#: CPU flags of fast bfloat16 arithmetic, as Linux names them.
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@functools.cache
def has_gpu() -> bool:
    """True if torch is installed and can use a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    if not any(any(Path("/dev").glob(pattern)) for pattern in GPU_DEVICES):
        return False
    import torch

    return bool(torch.cuda.is_available())


@functools.cache
def has_fast_bf16() -> bool:
    """True on a GPU, or on a CPU with AVX512-BF16 or AMX; False where nothing says so (no Linux)."""
    if has_gpu():
        return True
    try:
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return False
    return flags is not None and bool(BF16_FLAGS & set(flags[1].split()))

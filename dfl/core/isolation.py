"""Global settings of torch and numpy that hold while a run computes, and not between its rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
else:
    from dfl.core.lazy import torch


@contextmanager
def isolated(threads: int) -> Iterator[None]:
    """Compute under fixed settings, and restore the caller's at the end.

    Fixed are the default dtype (float32) and device (cpu), the number of threads, the precision of
    float32 products, those of cuDNN too, that cuDNN takes algorithms that round alike every time,
    the recording of gradients (on), inference mode and autocast (off), and what numpy does about
    floating-point errors.

    Args:
        threads: the number of threads of this rank.
    """
    dtype = torch.get_default_dtype()
    caller_threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn
    tf32, deterministic, benchmark = cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    with ExitStack() as settings:
        settings.enter_context(
            np.errstate(divide="warn", over="warn", under="ignore", invalid="warn")
        )
        settings.enter_context(torch.inference_mode(False))
        settings.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                settings.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":  # it costs time at every operation
            settings.enter_context(torch.device("cpu"))
        try:
            torch.set_default_dtype(torch.float32)
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision("highest")
            cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = False, True, False
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(caller_threads)
            torch.set_float32_matmul_precision(precision)
            cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = tf32, deterministic, benchmark

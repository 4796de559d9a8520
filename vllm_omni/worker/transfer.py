"""Small arrays of the host on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def on_device(values: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """As a tensor on a device, without waiting for what the device is at."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)

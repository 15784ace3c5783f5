"""A user's module that decides for a device as it is imported."""

from __future__ import annotations

import torch

AVAILABLE = torch.cuda.is_available()

"""What every test shares: one thread, so that runs compare and the machine is not fought over."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

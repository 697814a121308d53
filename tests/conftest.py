"""One torch thread: small models run fastest on it, and tests share the machine's cores."""

import torch

torch.set_num_threads(1)

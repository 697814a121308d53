"""One torch thread: small models run fastest on it, and tests share the machine's cores."""

import os

import torch

torch.set_num_threads(1)

# a second device gives autograd threads, after which worker processes cannot be forked: these files have a process of their own
ON_DEVICES = ["engine/test_device.py", "engine/test_own_device.py"]
collect_ignore = [] if os.environ.get("FEDTAILOR_TEST_DEVICE") else ON_DEVICES

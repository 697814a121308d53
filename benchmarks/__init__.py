"""Speed and memory, as ratios to bare PyTorch measured in the same run."""

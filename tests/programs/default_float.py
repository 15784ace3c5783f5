import torch

ONE = torch.ones(1)

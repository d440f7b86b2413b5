"""A small model, the rows of a site, and what its script does in a round."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def rows(site):
    number = int(site[-1])
    drawn = torch.Generator().manual_seed(number)
    y = torch.randint(0, 3, (20 + 4 * number,), generator=drawn)
    return torch.eye(3, 4)[y] * 2 + torch.randn(len(y), 4, generator=drawn), y


def train(net, x, y):
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

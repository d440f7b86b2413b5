"""What deep leakage from gradients was shown on, in small: pictures of digits, and LeNet with sigmoids."""

import numpy as np
from sklearn.datasets import load_digits
from torch import nn


def digit_images() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training and test images [rows, 1, 8, 8] of grey levels 0 to 1, and their classes; every fifth tests."""
    found = load_digits()
    images, classes = found.images[:, None].astype(np.float32) / 16.0, found.target.astype(np.int64)
    tests = np.arange(len(images)) % 5 == 0
    return images[~tests], classes[~tests], images[tests], classes[tests]


def sigmoid_lenet() -> nn.Module:
    """Return it for such images (Zhu et al., NeurIPS 2019): smooth everywhere, as matching by L-BFGS needs."""
    layers = [nn.Conv2d(1, 12, 5, padding=2, stride=2), nn.Sigmoid()]
    layers += [nn.Conv2d(12, 12, 5, padding=2), nn.Sigmoid(), nn.Conv2d(12, 12, 5, padding=2), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(192, 10))

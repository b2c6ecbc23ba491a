"""Networks for images of any number of channels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UsageError


def cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two convolutions and two linear layers, without BatchNorm or dropout: 7 MB on MNIST, 9 MB on CIFAR.

    Its gradient on a joined batch is the mean of the parts' gradients, so policies can be compared exactly.
    """
    channels, height, width = _image_shape("cnn", input_shape)
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 512),
        nn.ReLU(),
        nn.Linear(512, num_classes),
    )


def lenet(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """LeNet-5, with the largest of four pixels where it takes their mean (LeCun et al., 1998): 250 kB on MNIST."""
    channels, height, width = _image_shape("lenet", input_shape)
    padding = 0 if min(height, width) >= 12 else 2  # 5 pixels are needed for an unpadded convolution
    rows, columns = ((side // 2 + 2 * padding - 4) // 2 for side in (height, width))
    return nn.Sequential(
        nn.Conv2d(channels, 6, kernel_size=5, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5, padding=padding),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * rows * columns, 120),
        nn.Tanh(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, num_classes),
    )


def resnet20(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """ResNet-20 for small images, with shortcuts without parameters (He et al., 2016; their option A)."""
    channels, _, _ = _image_shape("resnet20", input_shape)
    network = nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *_stage(16, 16, stride=1),
        *_stage(16, 32, stride=2),
        *_stage(32, 64, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut that subsamples, and pads new channels with zeros."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = out_channels - in_channels
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        residual = F.relu(self.norm1(self.conv1(x)))
        residual = self.norm2(self.conv2(residual))
        return F.relu(residual + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            x = F.pad(x, (0, 0, 0, 0, 0, self.new_channels))
        return x


def _stage(in_channels: int, out_channels: int, stride: int) -> list[ResidualBlock]:
    """Three blocks, the first of which changes the size."""
    return [
        ResidualBlock(in_channels, out_channels, stride),
        ResidualBlock(out_channels, out_channels, 1),
        ResidualBlock(out_channels, out_channels, 1),
    ]


def _image_shape(name: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < 4:
        raise UsageError(
            f"{name} reads images of (channels, height, width), at least 4x4, and the inputs here have the "
            f"shape {input_shape}; use net1, net2, net3 or mlp"
        )
    channels, height, width = input_shape
    return channels, height, width

"""Packets: what a codec sends, behind a header by which a truncated or altered one is refused.

The header has 32 bytes, little-endian: a mark, a number of the codec with its options, the count of values, the bytes
of the body, and a checksum of the body.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.errors import WireError

HEADER = struct.Struct("<4sIQQQ")
MARK = b"PLC1"
WORD = 4  # bytes: bodies are made of words

# A change of one word changes the checksum, since every factor is odd; other changes but for one in 2^64.
_FACTOR, _STEP = 0x1E3779B97F4A7C15, 0x3C6EF372FE94F82A


def seal(packet: Tensor, end: int, tag: int, count: int) -> Tensor:
    """Write the header before a body that ends at ``end``, a multiple of 4; return the packet without what follows."""
    packet = packet[:end]
    body = packet[HEADER.size :]
    header = HEADER.pack(MARK, tag, count, body.numel(), checksum(body))
    packet[: HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return packet


def unseal(packet: Tensor, tag: int, count: int, codec: object) -> Tensor:
    """Give the body of a packet; raise WireError if it is not one of this codec for so many values."""
    if packet.dtype != torch.uint8 or packet.dim() != 1 or packet.device.type != "cpu":
        raise WireError(f"wanted a packet of {codec}: bytes on the CPU, got {packet.dtype} of {tuple(packet.shape)}")
    if packet.numel() < HEADER.size:
        raise WireError(f"wanted a packet of {codec}, got {packet.numel()} bytes, less than a header")
    packet = packet.contiguous()
    if packet.data_ptr() % 8 or packet.storage_offset() % 8:
        packet = packet.clone()
    body = packet[HEADER.size :]
    mark, found_tag, found_count, length, found_sum = HEADER.unpack(packet[: HEADER.size].numpy().tobytes())
    if mark != MARK:
        raise WireError(f"wanted a packet of {codec}, got bytes that begin with {mark!r}; were they altered?")
    if found_tag != tag:
        raise WireError(f"wanted a packet of {codec}, got one of another codec; do both ends use the same options?")
    if found_count != count:
        raise WireError(f"wanted a packet of {count} values of {codec}, got one of {found_count}")
    if length != body.numel() or length % WORD:
        raise WireError(f"a packet of {codec} says that its body has {length} bytes, but {body.numel()} came")
    if found_sum != checksum(body):
        raise WireError(f"a packet of {codec} was altered on its way: its checksum is wrong")
    return body


def checksum(body: Tensor) -> int:
    """The sum of all 32-bit words, each times an odd factor of its own, modulo 2^64."""
    if kernels.native is not None:
        plain, weighted = kernels.native.sums(body.data_ptr(), body.numel() // WORD)
    else:
        words = body.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        plain = int(words.sum())
        weighted = int((words * torch.arange(words.numel())).sum())
    total: int = plain * _FACTOR + weighted * _STEP
    return total % 2**64


def put(into: Tensor, at: int, values: Tensor) -> int:
    """Write values at a place of a body, as bytes; return where they end, filled up with zeros to a whole word."""
    data = values.flatten().view(torch.uint8)
    end = at + data.numel()
    into[at:end] = data
    return fill(into, end)


def fill(into: Tensor, end: int) -> int:
    """Fill a body with zeros to the next whole word, and return where that ends."""
    whole = words(end)
    into[end:whole] = 0
    return whole


def words(size: int) -> int:
    """So many bytes as whole words."""
    return -(-size // WORD) * WORD


class Reader:
    """Reads a body from its beginning; raises WireError where it is too short."""

    def __init__(self, body: Tensor) -> None:
        self.body, self.at = body, 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """The next values, and the zeros behind them to a whole word."""
        size = count * dtype.itemsize
        end = self.at + words(size)
        if count < 0 or end > self.body.numel():
            raise WireError(f"a packet ends too early: wanted {size} bytes at {self.at} of {self.body.numel()}")
        data = self.body[self.at : self.at + size]
        self.at = end
        return data.view(dtype)

    def number(self) -> int:
        """The next whole number of 32 bits."""
        return int(self.take(1, torch.int32)) & 0xFFFFFFFF

    def rest(self) -> Tensor:
        return self.body[self.at :]

    def end(self) -> None:
        if self.at != self.body.numel():
            raise WireError(f"a packet has {self.body.numel() - self.at} bytes too many")


def refuse(what: str) -> WireError:
    """Build the error for a packet whose checksum is right and whose content cannot be."""
    return WireError(f"a packet cannot be decoded: {what}")

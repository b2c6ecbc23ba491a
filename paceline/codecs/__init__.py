"""How values become fewer bytes, as values: one small file per idea, one table from name to class."""

from __future__ import annotations

from paceline.codecs.base import Codec, CodecState, Collective, Part, Parts, Pending, PendingPackets
from paceline.codecs.cast import Cast
from paceline.codecs.power_sgd import PowerSGD
from paceline.codecs.qsgd import QSGD
from paceline.codecs.sign import Sign
from paceline.codecs.sparse_ternary import SparseTernary
from paceline.codecs.threshold import Threshold
from paceline.codecs.top_k import TopK
from paceline.errors import UsageError
from paceline.spec import from_spec

__all__ = [
    "CODECS",
    "QSGD",
    "Cast",
    "Codec",
    "CodecState",
    "Collective",
    "Part",
    "Parts",
    "Pending",
    "PendingPackets",
    "PowerSGD",
    "Sign",
    "SparseTernary",
    "Threshold",
    "TopK",
    "parse_codec",
    "read_codec",
]

_ALL: tuple[type[Codec], ...] = (Cast, QSGD, Sign, TopK, SparseTernary, Threshold, PowerSGD)
CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in _ALL}


def parse_codec(text: str) -> Codec:
    """Read a codec from its text form.

    >>> str(parse_codec("top-k(density=0.001, momentum=0.9)"))
    'top-k(momentum=0.9)'
    """
    return from_spec("codec", CODECS, text)


def read_codec(codec: str | Codec | None) -> Codec | None:
    """Read a codec from its text form or as it is; ``None`` and ``"none"`` are no codec.

    >>> read_codec("none")
    """
    if codec is None or codec == "none" or isinstance(codec, Codec):
        return codec if isinstance(codec, Codec) else None
    if isinstance(codec, str) and codec:
        return parse_codec(codec)
    raise UsageError(f"wanted a codec or its text form, got {codec!r}; for example codec='top-k(density=0.001)'")

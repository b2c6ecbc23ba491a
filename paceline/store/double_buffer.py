"""The double buffer: a server's state, twice in memory that outlives its process.

A server that is killed, at any instant, loses no commit that it has acknowledged. Its parameters, buffers and
optimizers' tensors lie in a file that the supervisor holds open. One copy is the work, which the optimizers step in
place. The other is the spare. A word says whether an update is under way; until it is done, the spare has the version
before. Then the rest of the state (rates, counts, which batches are used) is written as a note, the word is set, and
only then are the workers told. The spare is brought up to date before the next update, if possible while nobody waits.
So at any instant one of the two copies is whole, and the word says which.

If several servers hold the parameters, each has a double buffer for its part. An update counts when the first server
has it whole, and the first server is the last to have it. Until another server hears of that, it keeps the version
before in its spare, to go back to.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import CheckpointError, CommError
from paceline.record.state_tree import pack, unpack
from paceline.store.copying import copy
from paceline.store.layout import Layout, aligned
from paceline.store.memory import map_part
from paceline.train_state import TrainState, parameters_of

logger = logging.getLogger("paceline")

_GIVEN_UP = 1
_MAGIC = 0x544C554156434150  # "PACVAULT"
_WORD = struct.Struct("@Q")  # native: then it is written by one instruction, and never in part
_WORDS = struct.Struct("@QQQQQ")
# Places of the words: the mark; twice the number of the last note, plus 1 while an update is under way; the lengths of
# the two notes; the number of pushes that wait for a commit.
_MARK, _STAND, _LENGTHS, _TAKEN = 0, 8, 16, 32
# The file is sparse: its parts may lie far apart, and only what is written takes memory.
_START = 1 << 40  # the place of the words, behind the memory that the workers share
_NOTES = _START + mmap.PAGESIZE
_NOTE = 1 << 24  # the largest note
_STATE = _NOTES + 2 * _NOTE  # the optimizers' tensors, in stretches
_SPARE = 1 << 41  # bytes from a place of the work to the same place of the spare
_UNCHANGING = (int, float, str, type(None), tuple)
_DESCRIPTION = struct.Struct("<Q")  # the length of a stretch's description; that follows, then the tensors


class _Stretch(NamedTuple):
    """A part of the file that holds tensors, mapped twice: as work and as spare."""

    work: Tensor
    spare: Tensor


class DoubleBuffer:
    """Keep what commits of ``train_state`` change in ``file``; ``down``, at ``offset``, is mapped already."""

    def __init__(self, file: int, train_state: TrainState, down: Tensor, offset: int) -> None:
        self._file, self._train_state = file, train_state
        if os.fstat(file).st_size < _STATE:
            os.ftruncate(file, _STATE)
        self._words = mmap.mmap(file, mmap.PAGESIZE, offset=_START)
        self._notes = [mmap.mmap(file, _NOTE, offset=_NOTES + side * _NOTE) for side in (0, 1)]
        self._stretches: list[_Stretch] = []
        self._extents: list[tuple[int, int]] = []  # offset and length of the stretches of optimizers' tensors
        self._placed: dict[tuple[int, int, str], Tensor] = {}  # by optimizer, parameter and name
        self._absent: list[tuple[int, int, str]] = []  # those of them that the optimizers have dropped
        self._others: list[tuple[int, int, str, Any]] = []  # what the optimizers' states hold beside tensors
        self._small: tuple[dict[str, Any], str] | None = None  # the last small state, and its text
        self._behind = True  # whether the spare is older than the work
        self._keeps = True  # False after giving up
        try:
            self._stretches.append(_Stretch(down, map_part(file, offset + _SPARE, len(down))))
        except OSError as error:
            self._give_up(error)

    def begin(self, version: int, note: Mapping[str, Any]) -> None:
        """Keep the present state as the first one."""
        self.after_update(version, note)
        if self._keeps:
            self._set(_MARK, _MAGIC)

    def note_of(self, version: int) -> dict[str, Any]:
        """Give the note of ``version``, to recover from; an update after it, of which nobody was told, is undone.

        Raise ``CommError`` if another version was kept.
        """
        found = read_note(self._file)
        stand = self._word(_STAND)
        if found is not None and found["version"] == version + 1 and stand % 2 == 0:
            self._set(_STAND, stand - 1)  # as if it were still under way: the spare has the version before
            found = read_note(self._file)
        if found is None or found["version"] != version:
            kept = "nothing" if found is None else f"version {found['version']}"
            raise CommError(f"the run goes on from version {version}, and of a part of it {kept} was kept")
        return found

    def recover(self, found: Mapping[str, Any]) -> None:
        """Restore the state of the last whole commit; ``found`` is what ``read_note`` gives."""
        self._extents = [(offset, length) for offset, length in found["extents"]]
        self._stretches += [self._stretch(offset, length) for offset, length in self._extents]
        stand = self._word(_STAND)
        if stand % 2:
            for stretch in self._stretches:
                stretch.work.copy_(stretch.spare)
            self._set(_STAND, stand - 1)
        for stretch in self._stretches[1:]:
            self._read_stretch(stretch.work)
        self._load(found)
        self._place_tensors()  # as after an update: the next note has to name all tensors

    def before_update(self) -> None:
        """Begin an update; from now on the spare has the version to go back to."""
        if self._keeps:
            self.catch_up()
            self._set(_STAND, self._word(_STAND) + 1)

    def after_update(self, version: int, note: Mapping[str, Any], waiting: int = 0) -> None:
        """End the update that made ``version``; when this returns, workers may be told.

        ``waiting`` is the number of pushes that still wait for a commit.
        """
        if not self._keeps:
            return
        try:
            self._place_tensors()
            self._write(version, note)
        except (OSError, CheckpointError, IndexError) as error:
            self._give_up(error)
            return
        self._behind = True
        self.taken(waiting)

    def note_again(self, version: int, note: Mapping[str, Any]) -> None:
        """Write the note anew, before workers are told something that is no commit."""
        if self._keeps:
            self._write(version, note)

    def _write(self, version: int, note: Mapping[str, Any]) -> None:
        front = json.dumps({**note, "version": version, "extents": self._extents, "absent": self._absent})
        text = f'{front[:-1]}, "small": {self._small_state()}}}'.encode()
        number = self._word(_STAND) // 2 + 1
        side = number % 2  # the other one has the note before
        self._notes[side][: len(text)] = text
        self._set(_LENGTHS + 8 * side, len(text))
        self._set(_STAND, 2 * number)

    def taken(self, pushes: int) -> None:
        """Record how many pushes wait for a commit; they are lost if the server is killed."""
        self._set(_TAKEN, pushes)

    def catch_up(self) -> None:
        """Copy the work to the spare, if that is older."""
        if self._keeps and self._behind:
            for stretch in self._stretches:
                copy(stretch.spare, stretch.work)
            self._behind = False

    def _give_up(self, error: Exception) -> None:
        """Keep nothing from now on: there is too little memory, or an optimizer's state cannot be written."""
        logger.warning("from now on the run ends if its server is killed, to be resumed from a checkpoint: %s", error)
        self._keeps = False
        self._set(_MARK, _GIVEN_UP)

    # Tensors of the optimizers -----------------------------------------------------------------------------------

    def _place_tensors(self) -> None:
        """Have the optimizers' tensors in the file: new ones get a stretch, replaced ones are copied there."""
        new: dict[tuple[int, int, str], Tensor] = {}
        self._others = []
        count = 0
        for key, value in _entries_of(self._train_state.holders):
            if not isinstance(value, Tensor):
                self._others.append((*key, value))
                continue
            count += 1
            stored = self._placed.get(key)
            if stored is None or stored.shape != value.shape or stored.dtype != value.dtype:
                new[key] = value
            elif value.data_ptr() != stored.data_ptr():
                _move(value, stored)
        if new:
            self._add_stretch(new)
        self._absent = []
        if count != len(self._placed):
            present = {key for key, _ in _entries_of(self._train_state.holders)}
            self._absent = [key for key in self._placed if key not in present]

    def _add_stretch(self, tensors: Mapping[tuple[int, int, str], Tensor]) -> None:
        described = [[*key, list(value.shape), str(value.dtype)] for key, value in tensors.items()]
        text = json.dumps(described).encode()
        layout = Layout(list(tensors.values()))
        front = aligned(_DESCRIPTION.size + len(text))
        offset = sum(self._extents[-1], start=0) if self._extents else _STATE
        offset = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = front + layout.nbytes
        stretch = self._stretch(offset, length)
        head = _DESCRIPTION.pack(len(text)) + text
        stretch.work[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for (key, value), view in zip(tensors.items(), layout.views(stretch.work[front:]), strict=True):
            _move(value, view)
            self._placed[key] = view
        self._stretches.append(stretch)
        self._extents.append((offset, length))

    def _stretch(self, offset: int, length: int) -> _Stretch:
        return _Stretch(map_part(self._file, offset, length), map_part(self._file, offset + _SPARE, length))

    def _read_stretch(self, memory: Tensor) -> None:
        """Find the tensors of a stretch by its description."""
        raw = bytes(memory[: _DESCRIPTION.size].numpy())
        (length,) = _DESCRIPTION.unpack(raw)
        described = json.loads(bytes(memory[_DESCRIPTION.size : _DESCRIPTION.size + length].numpy()))
        like = [torch.empty(shape, dtype=_dtype(dtype), device="meta") for *_, shape, dtype in described]
        views = Layout(like).views(memory[aligned(_DESCRIPTION.size + length) :])
        for (optimizer, parameter, name, *_), view in zip(described, views, strict=True):
            self._placed[optimizer, parameter, name] = view

    # Everything else ---------------------------------------------------------------------------------------------

    def _small_state(self) -> str:
        """Give all state but the optimizers' tensors, as JSON: rates, schedulers, counts."""
        state = {
            "groups": [
                [{**group, "params": None} for group in each.param_groups] for each in self._train_state.holders
            ],
            "schedulers": [scheduler.state_dict() for scheduler in self._train_state.schedulers],
            "others": self._others,
        }
        if self._small is not None and self._small[0] == state:
            return self._small[1]
        tree, tensors = pack(state)
        written = {name: [str(tensor.dtype), tensor.tolist()] for name, tensor in tensors.items()}
        text = json.dumps({"state": tree, "tensors": written})
        groups = [group for each in self._train_state.holders for group in each.param_groups]
        values = [value for group in groups for name, value in group.items() if name != "params"]
        values += [entry[-1] for entry in self._others]
        lasting = not (tensors or self._train_state.schedulers) and all(
            isinstance(value, _UNCHANGING) for value in values
        )
        self._small = (state, text) if lasting else None  # a list or tensor may change and still be the same object
        return text

    def _load(self, found: Mapping[str, Any]) -> None:
        small = found["small"]
        tensors = {name: torch.tensor(value, dtype=_dtype(dtype)) for name, (dtype, value) in small["tensors"].items()}
        state = unpack(small["state"], tensors)
        optimizers = self._train_state.holders
        for optimizer, groups in zip(optimizers, state["groups"], strict=True):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update({**saved, "params": group["params"]})
        absent = {(index, parameter, name) for index, parameter, name in found["absent"]}
        for (index, parameter, name), view in self._placed.items():
            if (index, parameter, name) in absent:
                continue
            owner = parameters_of(optimizers[index])[parameter]
            optimizers[index].state[owner][name] = view if owner.device.type == "cpu" else view.to(owner.device)
        for index, parameter, name, value in state["others"]:
            optimizers[index].state[parameters_of(optimizers[index])[parameter]][name] = value
        for scheduler, saved in zip(self._train_state.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)

    def _word(self, offset: int) -> int:
        return int(_WORD.unpack_from(self._words, offset)[0])

    def _set(self, offset: int, value: int) -> None:
        _WORD.pack_into(self._words, offset, value)


def read_note(file: int) -> dict[str, Any] | None:
    """Read the note of the last whole commit; None if no server has kept anything in ``file``.

    Its ``taken`` is the number of pushes that waited for a commit, and are lost. Raise ``CommError`` if the server had
    given up keeping its state.
    """
    words = os.pread(file, _WORDS.size, _START)
    if len(words) < _WORDS.size:
        return None
    magic, stand, *lengths, taken = _WORDS.unpack(words)
    if magic == _GIVEN_UP:
        raise CommError("what the server had was not kept when it was killed; resume the run from its last checkpoint")
    if magic != _MAGIC:
        return None
    side = stand // 2 % 2
    return {**json.loads(os.pread(file, lengths[side], _NOTES + side * _NOTE)), "taken": taken}


def _entries_of(optimizers: Sequence[Optimizer]) -> Iterator[tuple[tuple[int, int, str], Any]]:
    """Give each entry of the optimizers' states, by optimizer, parameter and name."""
    for index, optimizer in enumerate(optimizers):
        if optimizer.state:
            if not all(isinstance(key, Tensor) for key in optimizer.state):
                raise CheckpointError(f"{type(optimizer).__name__} remembers things that belong to no parameter")
            for number, parameter in enumerate(parameters_of(optimizer)):
                for name, value in optimizer.state.get(parameter, {}).items():
                    yield (index, number, name), value


def _move(tensor: Tensor, target: Tensor) -> None:
    """Copy a tensor to its place, which becomes its memory unless it is on another device."""
    target.copy_(tensor.detach())
    if tensor.device.type == "cpu":
        if tensor._base is not None or tensor.untyped_storage().nbytes() != tensor.nbytes:
            raise CheckpointError(
                "an optimizer's state shares memory with something else, from which it cannot be moved"
            )
        tensor.data = target


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found

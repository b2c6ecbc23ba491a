"""Programs with ``torch.distributed.checkpoint``: a sharded model, saved by one number of ranks, loaded by another."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_programs import Net, full, sharded, train
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.checkpoint.stateful import Stateful


class Trained(Stateful):
    """A model and its optimizer, as one thing to save."""

    def __init__(self) -> None:
        self.model = sharded(Net())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def tensors(self) -> dict[str, Tensor]:
        """All parameters and the optimizer's state, put together again."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        results = {name: full(value) for name, value in self.model.state_dict().items()}
        for parameter, state in self.optimizer.state.items():
            results |= {f"{key} of {names[id(parameter)]}": full(value) for key, value in state.items()}
        return results


def save(directory: Path) -> dict[str, Tensor]:
    trained = Trained()
    train(trained.model, dist.get_rank(), optimizer=trained.optimizer)
    save_checkpoint({"trained": trained}, checkpoint_id=directory / "checkpoint")
    return trained.tensors()


def load(directory: Path) -> dict[str, Tensor]:
    """Load what the other program saved."""
    torch.manual_seed(1)
    trained = Trained()
    load_checkpoint({"trained": trained}, checkpoint_id=directory / "checkpoint")
    return trained.tensors()


def save_asynchronously(directory: Path) -> dict[str, Tensor]:
    """Train on while the file is written; what is loaded is what was there before."""
    trained = Trained()
    train(trained.model, dist.get_rank(), optimizer=trained.optimizer)
    before = {f"before.{name}": value for name, value in trained.tensors().items()}
    there = directory / f"asynchronous-{dist.get_world_size()}"
    saving = async_save({"trained": trained}, checkpoint_id=there, process_group=dist.new_group())
    train(trained.model, dist.get_rank(), optimizer=trained.optimizer)
    assert isinstance(saving, Future)
    saving.result()
    load_checkpoint({"trained": trained}, checkpoint_id=there)
    after = trained.tensors()
    assert all(torch.equal(value, after[name.removeprefix("before.")]) for name, value in before.items())
    return after

"""Run programs of ``torch.distributed`` on several ranks, on a backend of choice, and get what they computed.

A program is a function of a file beside this one. It finds the default group made, gets a directory that all ranks and
launches on that backend share, and returns tensors by name. The ranks are forks of one process that has imported
torch: that costs seconds, and they are paid once for all programs and ranks of a launch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from processes import ENVIRONMENT
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

Program = Callable[[Path], dict[str, Tensor]]

DEADLINE = 280.0
GROUP_TIMEOUT = timedelta(seconds=200)


class Launch:
    """What the ranks of one launch left behind, program by program."""

    def __init__(self, backend: str, ranks: int, directory: Path, output: str) -> None:
        self.backend, self.ranks, self.directory, self.output = backend, ranks, directory, output

    def results(self, program: str) -> list[dict[str, Tensor]]:
        """The tensors of every rank; if one failed, its traceback is the error."""
        files = [_file(self.directory, program, rank, self.ranks) for rank in range(self.ranks)]
        errors = [file.with_suffix(".error").read_text() for file in files if file.with_suffix(".error").exists()]
        assert not errors, f"{program} on {self.backend}:\n" + "\n".join(errors)
        assert all(file.exists() for file in files), f"{program} on {self.backend} did not end:\n{self.output}"
        return [load_file(file) for file in files]


def launch(backend: str, ranks: int, directory: Path, programs: list[str]) -> Launch:
    """Run the programs, each given as ``module:function``, one after the other on the same ranks."""
    directory.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, backend, str(ranks), str(directory), str(store.port), *programs]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return Launch(backend, ranks, directory, output)


def _file(directory: Path, program: str, rank: int, ranks: int) -> Path:
    return directory / f"{program.partition(':')[2]}-{rank}-of-{ranks}.safetensors"


def _fork_ranks(backend: str, ranks: int, directory: Path, port: int, programs: list[str]) -> None:
    functions = {name: _function(name) for name in programs}
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                _be_rank(backend, rank, ranks, directory, port, functions)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _function(name: str) -> Program:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def _be_rank(backend: str, rank: int, ranks: int, directory: Path, port: int, functions: dict[str, Program]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="backend 'paceline' uses Gloo")
    faulthandler.dump_traceback_later(0.8 * DEADLINE)  # where it hangs, if it does
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    kept = []  # Gloo's groups: PowerSGD's callbacks would free one on its own thread, which ends the process
    for name, function in functions.items():
        file = _file(directory, name, rank, ranks)
        try:
            place = PrefixStore(name, store)
            dist.init_process_group(backend, store=place, rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT)
            kept += [dist.group.WORLD] if backend == "gloo" else []
            torch.manual_seed(0)
            results = function(directory)
            dist.destroy_process_group()
            save_file({key: tensor.detach().contiguous().clone() for key, tensor in results.items()}, file)
        except BaseException:
            file.with_suffix(".error").write_text(traceback.format_exc())
            if dist.is_initialized():
                dist.destroy_process_group()


if __name__ == "__main__":
    import paceline  # noqa: F401

    _fork_ranks(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])

"""`dfl.load(DIR)`: the rows, the peers and the models of a run, read from its folder.

Everything comes from the files that `dfl.store.run_files` wrote; nothing is unpickled.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dfl.config import Run
from dfl.core.errors import InputError, one_line
from dfl.core.options import options
from dfl.core.parse import KINDS, nearest, shown
from dfl.evaluation.goals import FALLING
from dfl.evaluation.metrics import rounds_to
from dfl.models.modules import fill, modules_of, running_statistics
from dfl.models.sharing import nets_of
from dfl.models.zoo import NamedModels, without_values
from dfl.store import manifest, tables
from dfl.store.html import table

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor
    from torch.nn import Module
else:
    from dfl.core.lazy import torch


@dataclass(frozen=True)
class Result:
    """A run read from its folder; every file is read on first use.

    Attributes:
        folder: of the run.
        record: run.json.
        module: the caller's own module where the run trained one, or all where it trained several.
    """

    folder: Path
    record: dict[str, Any]
    module: Module | Sequence[Module] | None = None

    @cached_property
    def run(self) -> Run:
        """The settings, with peers, algorithm and compressor filled in."""
        return Run.from_dict(self.record["run"])

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The evaluations so far, a row each; of a run that is not over, the complete ones."""
        import pandas as pd

        path = self._whole("metrics.csv", self.record.get("exit") is None)
        try:
            text = tables.read(path).text
        except FileNotFoundError:
            raise InputError(f"{path} is missing") from None
        return tables.as_table(text) if text else pd.DataFrame(columns=["round"])

    def to_frame(self, *settings: str) -> pd.DataFrame:
        """Return the evaluations so far with some settings of the run as further columns.

            pd.concat(dfl.load(folder).to_frame("topology", "bits") for folder in folders)

        Args:
            settings: fields of `Run`.

        Raises:
            InputError: there is no such field.
        """
        known = list(options(Run))
        for name in settings:
            if name not in known:
                raise InputError(f"unknown setting {shown(name)}{nearest(str(name), known)}")
        return self.rows.assign(**{name: getattr(self.run, name) for name in settings})

    def _repr_html_(self) -> str:
        """Return the run as a table for notebooks: how it ended, its settings, its last figures."""
        default = Run().to_dict()
        settings = {k: v for k, v in self.run.to_dict().items() if v != default.get(k)}
        figures: dict[str, str] = {}
        with suppress(InputError):  # a run that has not evaluated yet
            last = self.rows.tail(1)
            figures = {str(name): f"{value:.6g}" for name in last for value in last[name]}
        return table(f"{self.folder}: {self.record['ending']}", settings | figures)

    def rounds_to(self, target: float, column: str = "accuracy_mean") -> float:
        """Return the rounds until a column reached a target, by `dfl.evaluation.metrics.rounds_to`.

        NaN where it did not. The columns in `dfl.evaluation.goals.FALLING`, as the loss, reach it
        from above, every other column from below.

        Raises:
            InputError: the target is no number, or there are rows without such a column.
        """
        if not isinstance(target, Real):
            raise InputError(f"target must be a number, not {shown(target)}")
        if self.rows.empty:
            return math.nan
        if column not in self.rows:
            known = [str(name) for name in self.rows]
            raise InputError(f"{self.folder} has no column {column!r}{nearest(column, known)}")
        sign = -1 if column in FALLING else 1
        figures = sign * self.rows[column].astype(float)
        return rounds_to(self.rows["round"].tolist(), figures.tolist(), sign * target)

    @cached_property
    def peers(self) -> pd.DataFrame:
        """The peers at the end, a row each.

        Raises:
            InputError: an unfinished run, one that run_grid ran in_process, or a damaged file.
        """
        return tables.as_table(self._whole("peers.csv").read_text())

    @cached_property
    def history(self) -> pd.DataFrame:
        """The peers at every evaluation so far, a row for each evaluation and peer.

            run.history.groupby("round")["accuracy"].describe()

        Its columns are the round, the peer and the figures of the peers in float32, as callbacks
        receive them. Its file has no checksum: only its form is checked.

        Raises:
            InputError: the file has another form, or the run wrote none: it has not evaluated yet,
                or run_grid ran it in_process.
        """
        import pandas as pd

        from dfl.store.history import read_evaluations

        held = read_evaluations(self.folder)
        if held is None:
            raise self._lacks("history")
        evaluations, _, peers = held.values.shape
        frame = pd.DataFrame(
            {
                "round": np.repeat(held.rounds, peers),
                "peer": np.tile(np.arange(peers), evaluations),
            }
        )
        for k, name in enumerate(held.columns):
            frame[name] = held.values[:, k].ravel().astype(np.float32)
        return frame

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """The models at the end, by parameter name.

        Each is (P, *shape); of a server and of frozen parameters (1, *shape). Tied weights are
        there once, under the first of their names.

        Raises:
            InputError: an unfinished run, or a file that is damaged or holds no models.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self._whole("state.safetensors")
        try:
            state = load_file(path)
        except SafetensorError as error:
            raise InputError(f"{path} is damaged: {one_line(error)}") from None
        if not state:
            raise InputError(f"{path} holds no models: it has no tensors")
        for name, value in state.items():
            kind = str(value.dtype).removeprefix("torch.")
            if kind not in ("float32", "float64") or not value.ndim or not len(value):
                raise InputError(
                    f"{path} holds no models: {name} is {kind} of shape {tuple(value.shape)}, not "
                    "float32 or float64 with a row for each peer"
                )
        return state

    @property
    def honest(self) -> list[bool]:
        """Whether each of the models is that of an honest peer."""
        models = max(map(len, self.state.values()))
        return (
            (self.peers["is_attacker"] == 0).tolist()
            if "is_attacker" in self.peers and models > 1
            else [True] * models
        )

    def model(self, peer: int) -> Module:
        """Return a new module with the weights of one peer, in evaluation mode.

        Raises:
            InputError: there is no such peer, the run is unfinished, or the caller's own module is
                missing or another.
        """
        peers = self.run.peers or 0
        if not KINDS["int"].holds(peer) or not 0 <= peer < peers:
            raise InputError(f"{self.folder} has peers 0 to {peers - 1}, not {shown(peer)}")
        modules = self._modules()
        if len(modules) == 1:
            # A server has one model, which is that of all peers.
            weights = {
                name: value[min(peer, len(value) - 1)].clone() for name, value in self.state.items()
            }
            return self._filled(weights, modules[0])
        row, kind = divmod(peer, len(modules))
        own = {
            name: value[min(row, len(value) - 1)].clone()  # a frozen parameter has one row
            for name, value in self.state.items()
            if name.startswith(f"{kind}/")
        }
        common = {
            name: value[peer].clone() for name, value in self.state.items() if "/" not in name
        }
        own = {name.partition("/")[2]: value for name, value in own.items()}
        return self._filled(common | own, modules[kind])

    def mean_model(self) -> Module:
        """Return a new module with the mean of the honest peers' weights, in evaluation mode.

        The mean is taken in float64, as that of `accuracy_mean_model` is.

        Raises:
            InputError: an unfinished run, models of several kinds, or the caller's own module is
                missing or another.
        """
        module, *others = self._modules()
        if others:
            raise InputError(
                f"{self.folder} has models of {1 + len(others)} kinds, which have no mean"
            )
        honest = self.honest
        models = {name: value.numpy() for name, value in self.state.items()}
        models = {
            name: (value[honest] if len(value) == len(honest) else value).astype(np.float64)
            for name, value in models.items()
        }
        means = {name: value.sum(0) / len(value) for name, value in models.items()}
        weights = {
            name: torch.as_tensor(mean).to(self.state[name].dtype) for name, mean in means.items()
        }
        return self._filled(weights, module)

    def _filled(self, weights: dict[str, Tensor], module: Module) -> Module:
        nets = nets_of(str(self.run.auxiliary), str(self.run.fairness_adversary))
        idle = tuple(f"{net}." for net in nets)  # only training uses them
        weights = {name: value for name, value in weights.items() if not name.startswith(idle)}
        named = {**dict(module.named_parameters()), **running_statistics(module)}
        wanted = {name: tuple(value.shape) for name, value in named.items()}
        found = {name: tuple(value.shape) for name, value in weights.items()}
        if wanted != found:
            raise InputError(
                f"{self.folder} holds another model than this {type(module).__name__}: parameters "
                f"{found}, not {wanted}"
            )
        fill(module, weights)
        for layer in module.modules():
            for name, value in layer.named_buffers(recurse=False):
                if value.is_meta:  # torch's number of batches, which nothing here reads
                    setattr(layer, name, torch.zeros_like(value, device="cpu"))
        return module.eval()

    def _modules(self) -> tuple[Module, ...]:
        """New models of every kind of peer, their weights still to come."""
        if self.module is not None:
            return tuple(copy.deepcopy(each) for each in modules_of(self.module))
        made = self.record.get("model")
        if made is None:
            raise self._lacks("models")
        if made["own_module"]:
            raise InputError(
                f"{self.folder} trained its caller's own module: read it with load(DIR, module=...)"
            )
        shape = tuple(tuple(each) if isinstance(each, list) else each for each in made["shape"])
        places = tuple(made.get("places", ()))
        return tuple(
            without_values(build, shape, made["classes"], places)
            for build in NamedModels.of(str(self.run.model)).builds
        )

    def _whole(self, name: str, growing: bool = False) -> Path:
        """The path of a file that is as the run vouches for it; nothing vouches for one that grows.

        Raises:
            InputError: it is damaged or missing, or the run has not come to write it.
        """
        path, known = self.folder / name, self.record.get("files", {})
        if name in known and (line := manifest.damaged(self.folder, name, known[name])):
            raise InputError(line)
        if name not in known and not (growing and path.exists()):
            raise self._lacks(name)
        return path

    def _lacks(self, name: str) -> InputError:
        """Return the error of what the run has not written."""
        here = "model" not in self.record
        why = "run_grid ran it in_process" if here else f"the run is {self.record['ending']}"
        return InputError(f"{self.folder} has no {name}: {why}")


def load(folder: Path | str, module: Module | Sequence[Module] | None = None) -> Result:
    """Read a run from its folder.

    Args:
        folder: its run directory.
        module: the caller's own module or modules, if the run trained such. They are copied, never
            changed. All of their parameters, frozen ones too, get the values of the run.

    Raises:
        InputError: the folder holds no run, or run.json is damaged. Other files may be found
            damaged, too.
    """
    if not isinstance(folder, str | os.PathLike):
        raise InputError(f"load needs the folder of a run, not {shown(folder)}")
    if module is not None:
        modules_of(module)
    folder = Path(folder)
    return Result(folder, manifest.read_now(folder), module)

"""Fedsolve with an unchanged `nn.Module`; `MODE` is `compiled` or `callback`."""

import os
from typing import Any

import torch
from modules import MODULES
from rounds import timed
from work import NAME, ROUNDS, WORK, Meter, data

import fedsolve as fs
import fedsolve.torch

meter = Meter()
make, loss = MODULES[NAME]
torch.manual_seed(0)
x, y = data()
clients = {"x": x, "y": y if NAME == "torch" else y.astype("int64")}
mode, batch = os.environ.get("MODE", "compiled"), WORK.batch
problem = fs.torch.problem(make(), loss, clients, mode=mode, batch_size=batch)
epochs = None if batch is None else WORK.epochs
steps: dict[str, Any] = {"local_steps": WORK.steps} if epochs is None else {"local_epochs": epochs}
algorithm = fs.FedAvg(WORK.rate, participants=WORK.cohort, **steps)
meter.report(**timed(problem, algorithm, meter, ROUNDS))

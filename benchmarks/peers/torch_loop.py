"""A plain loop over clients in PyTorch, as a script has it: the module, its loss, `torch.optim`."""

import copy

import numpy as np
import torch
from modules import MODULES
from work import NAME, ROUNDS, WORK, Meter, data

TRIES = 3


def train(model, own):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), WORK.rate)
    order = torch.randperm(WORK.samples)
    for step in range(WORK.steps):
        batch = own
        if WORK.batch is not None:
            rows = order[step * WORK.batch : (step + 1) * WORK.batch]
            batch = {name: leaf[rows] for name, leaf in own.items()}
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def play(count, rng):
    for _ in range(count):
        total = None
        for j in rng.choice(len(x), min(WORK.cohort, len(x)), replace=False):
            model = copy.deepcopy(module)
            train(model, {"x": x[j], "y": y[j]})
            own = list(model.state_dict().values())
            total = own if total is None else [a + b for a, b in zip(total, own, strict=True)]
        assert total is not None
        mean = [value / min(WORK.cohort, len(x)) for value in total]
        names = module.state_dict().keys()
        module.load_state_dict(dict(zip(names, mean, strict=True)))


def evaluate():
    module.eval()
    with torch.no_grad():
        if NAME == "torch":
            return float(
                np.mean([loss(module, {"x": a, "y": b}) for a, b in zip(x, y, strict=True)])
            )
        rows, labels = x.flatten(0, 1).split(500), y.flatten().split(500)
        parts = [
            float(loss(module, {"x": a, "y": b})) * len(a)
            for a, b in zip(rows, labels, strict=True)
        ]
        return sum(parts) / y.numel()


meter = Meter()
make, loss = MODULES[NAME]
torch.manual_seed(0)
module = make()
x, y = map(torch.from_numpy, data())
y = y if NAME == "torch" else y.long()
if NAME == "torch":
    torch.set_num_threads(1)  # such small products are slower on several
rng = np.random.default_rng(0)
play(1, rng)
meter.first_done()
for _ in range(TRIES):
    play(ROUNDS, rng)
    meter.done(ROUNDS)
meter.pause()
found = evaluate()
meter.evaluated()
meter.report(loss=found)

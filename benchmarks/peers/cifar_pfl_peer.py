"""pfl on its own CIFAR-10 configuration, on a GPU where PyTorch has one."""

import os

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn
from work import ROUNDS, WORK, Meter, data

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(14 * 14 * 64, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)

    def forward(self, x):
        return self.layers(x)

    def loss(self, x, y, eval=False):
        self.train(not eval)
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x, y, eval=True):
        return {}


def pictures(x):
    """Images (…, 32, 32, 3) of bytes as PyTorch wants them, on the device."""
    return torch.from_numpy(np.moveaxis(x, -1, -3)).to(DEVICE).float() / 255


class Begin(TrainingProcessCallback):
    """The first round is set-up; then there are three tries."""

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if central_iteration == 0:
            meter.first_done()
        elif central_iteration % ROUNDS == 0:
            meter.done(ROUNDS)
        return False, Metrics()


meter = Meter()
x, y = data()
x, y = pictures(x), torch.from_numpy(y).long().to(DEVICE)
sampler = get_user_sampler("minimize_reuse", list(range(WORK.clients)))
users = FederatedDataset(lambda i: Dataset(raw_data=[x[i], y[i]], user_id=str(i)), sampler)
module = Network().to(DEVICE)
model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0))
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=3 * ROUNDS + 1,
        evaluation_frequency=10**9,
        train_cohort_size=WORK.cohort,
        val_cohort_size=None,
    ),
    backend=SimulatedBackend(training_data=users, val_data=users),
    model=model,
    model_train_params=NNTrainHyperParams(
        local_num_epochs=WORK.epochs, local_learning_rate=WORK.rate, local_batch_size=WORK.batch
    ),
    callbacks=[Begin()],
)
module.eval()
test = np.load(os.environ["DATA"])
with torch.no_grad():
    right = [
        (module(pictures(test["test_x"][i : i + 500])).argmax(1).cpu().numpy() == labels).mean()
        for i in range(0, len(test["test_x"]), 500)
        for labels in [test["test_y"][i : i + 500]]
    ]
    meter.pause()
    losses = [float(module.loss(a, b, eval=True)) for a, b in zip(x, y, strict=True)]
meter.evaluated()
meter.report(loss=float(np.mean(losses)), accuracy=float(np.mean(right)))

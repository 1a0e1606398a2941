"""pfl's simulated backend with a PyTorch model, evaluation off."""

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
from work import CLIENTS, COHORT, FEATURES, RATE, ROUNDS, STEPS, Meter, data


class Logistic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(FEATURES))

    def loss(self, x, y, **kwargs):
        margin = x @ self.w
        return torch.mean(torch.nn.functional.softplus(margin) - y * margin)

    def metrics(self, x, y, **kwargs):
        return {}


class Begin(TrainingProcessCallback):
    """The first two rounds are set-up."""

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if central_iteration == 1:
            meter.first_done()
        return False, Metrics()


torch.set_num_threads(1)
meter = Meter()
x, y = map(torch.from_numpy, data())
sampler = get_user_sampler("minimize_reuse", list(range(CLIENTS)))
users = FederatedDataset(lambda i: Dataset(raw_data=[x[i], y[i]], user_id=str(i)), sampler)
module = Logistic()
model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD([module.w], 1.0))
trained = FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=ROUNDS + 2,
        evaluation_frequency=10**9,
        train_cohort_size=COHORT,
        val_cohort_size=None,
    ),
    backend=SimulatedBackend(training_data=users, val_data=users),
    model=model,
    model_train_params=NNTrainHyperParams(
        local_num_epochs=STEPS, local_learning_rate=RATE, local_batch_size=None
    ),
    callbacks=[Begin()],
)
meter.done(ROUNDS)
meter.report(module.w.detach().numpy())

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
from work import NAME, ROUNDS, WORK, Meter, data


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(WORK.shape))

    def loss(self, x, y, **kwargs):
        scores = x @ self.w
        if self.w.ndim == 1:
            return torch.mean(torch.nn.functional.softplus(scores) - y * scores)
        return torch.nn.functional.cross_entropy(scores, y)

    def metrics(self, x, y, **kwargs):
        return {}


class Tries(TrainingProcessCallback):
    """The first two rounds are set-up; then come three tries."""

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        global found
        done = central_iteration + 1 - 2
        if done == 0:
            meter.first_done()
        elif done > 0 and done % ROUNDS == 0:
            meter.done(ROUNDS)
        if done == ROUNDS:
            found = module.w.detach().numpy().copy()
        return False, Metrics()


if NAME == "small":
    torch.set_num_threads(1)
meter = Meter()
x, y = map(torch.from_numpy, data())
y = y if NAME == "small" else y.long()
sampler = get_user_sampler("minimize_reuse", list(range(WORK.clients)))
users = FederatedDataset(lambda i: Dataset(raw_data=[x[i], y[i]], user_id=str(i)), sampler)
module, found = Linear(), None
model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD([module.w], 1.0))
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=3 * ROUNDS + 2,
        evaluation_frequency=10**9,
        train_cohort_size=WORK.cohort,
        val_cohort_size=None,
    ),
    backend=SimulatedBackend(training_data=users, val_data=users),
    model=model,
    model_train_params=NNTrainHyperParams(
        local_num_epochs=WORK.epochs,
        local_learning_rate=WORK.rate,
        local_batch_size=WORK.batch,
    ),
    callbacks=[Tries()],
)
meter.report(found)

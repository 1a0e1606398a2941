"""Flower's simulation engine: its clients are NumPy functions, its strategy is FedAvg."""

import logging
import os

import numpy as np
from work import ROUNDS, WORK, Meter, data

os.environ.setdefault("RAY_DEDUP_LOGS", "0")
import flwr as fl
from flwr.client import ClientApp, NumPyClient
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

logging.getLogger("flwr").setLevel(logging.ERROR)
meter, last = Meter(), {}
TRIES = 3
known = []  # a worker reads the data once
chance = np.random.default_rng(0)


def slope(w, x, y):
    scores = x @ w
    if w.ndim == 1:
        return x.T @ (1 / (1 + np.exp(-scores)) - y) / len(y)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(y)), y] -= 1
    return x.T @ shares / len(y)


class Client(NumPyClient):
    def __init__(self, index):
        if not known:
            known.extend(data())
        self.x, self.y = known[0][index], known[1][index]

    def fit(self, parameters, config):
        w, batch = parameters[0], WORK.batch or WORK.samples
        for _ in range(WORK.epochs):
            order = chance.permutation(WORK.samples)
            for rows in order.reshape(-1, batch):
                w = w - WORK.rate * slope(w, self.x[rows], self.y[rows])
        return [w.astype(np.float32)], WORK.samples, {}


def client(context):
    return Client(int(context.node_config["partition-id"])).to_client()


class Timed(FedAvg):
    def aggregate_fit(self, server_round, results, failures):
        found = super().aggregate_fit(server_round, results, failures)
        done = server_round - 2
        if done == 0:
            meter.first_done()
        elif done > 0 and done % ROUNDS == 0:
            meter.done(ROUNDS)
        if done == ROUNDS:
            last["w"] = parameters_to_ndarrays(found[0])[0]
        if done == TRIES * ROUNDS:
            meter.report(last["w"])
        return found


def server(context):
    strategy = Timed(
        fraction_fit=WORK.cohort / WORK.clients,
        fraction_evaluate=0.0,
        min_fit_clients=WORK.cohort,
        min_available_clients=WORK.clients,
        initial_parameters=ndarrays_to_parameters([np.zeros(WORK.shape, np.float32)]),
    )
    config = ServerConfig(num_rounds=TRIES * ROUNDS + 2)
    return ServerAppComponents(strategy=strategy, config=config)


app = ServerApp(server_fn=server), ClientApp(client_fn=client)
fl.simulation.run_simulation(*app, num_supernodes=WORK.clients)

"""Flower's simulation engine: its clients are NumPy functions, its strategy is FedAvg."""

import logging
import os

import numpy as np
from work import CLIENTS, COHORT, FEATURES, RATE, ROUNDS, SAMPLES, STEPS, Meter, data

os.environ.setdefault("RAY_DEDUP_LOGS", "0")
import flwr as fl
from flwr.client import ClientApp, NumPyClient
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

logging.getLogger("flwr").setLevel(logging.ERROR)
meter, last = Meter(), {}


class Client(NumPyClient):
    def __init__(self, index):
        x, y = data()
        self.x, self.y = x[index], y[index]

    def fit(self, parameters, config):
        w = parameters[0]
        for _ in range(STEPS):
            error = 1 / (1 + np.exp(-self.x @ w)) - self.y
            w = w - RATE * self.x.T @ error / SAMPLES
        return [w.astype(np.float32)], SAMPLES, {}


def client(context):
    return Client(int(context.node_config["partition-id"])).to_client()


class Timed(FedAvg):
    def aggregate_fit(self, server_round, results, failures):
        found = super().aggregate_fit(server_round, results, failures)
        last["w"] = parameters_to_ndarrays(found[0])[0]
        if server_round == 2:
            meter.first_done()
        if server_round == ROUNDS + 2:
            meter.done(ROUNDS)
            meter.report(last["w"])
        return found


def server(context):
    strategy = Timed(
        fraction_fit=COHORT / CLIENTS,
        fraction_evaluate=0.0,
        min_fit_clients=COHORT,
        min_available_clients=CLIENTS,
        initial_parameters=ndarrays_to_parameters([np.zeros(FEATURES, np.float32)]),
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS + 2))


fl.simulation.run_simulation(ServerApp(server_fn=server), ClientApp(client_fn=client), CLIENTS)

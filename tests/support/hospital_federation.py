"""A server and four hospitals in processes of their own, started with the owners' commands."""

import json
import os
import subprocess
import sys

import numpy as np

import fedsolve as fs
from fedsolve.flare import processes
from fedsolve.flare.provisioning import ADMIN
from tests.support.deployment import wait_until

HOSPITALS = ["east", "north", "south", "west"]
ALLOW = '[allow]\nproblems = ["clinic:screening"]\n'
CLINIC = """
import fedsolve as fs


def screening(clients: int = 8) -> fs.Problem:
    return fs.problems.neyman_pearson(clients=clients)
"""


class Hospitals:
    """A server and four sites, started with the owners' commands."""

    def __init__(self, place):
        self.place, self.started, self.runs = place, {}, 0
        (place / "clinic.py").write_text(CLINIC)
        names = ", ".join(f'"{name}"' for name in HOSPITALS)
        (place / "federation.toml").write_text(
            f'server = "localhost"\nport = {processes.free_port()}\nsites = [{names}]\n'
        )
        assert self.command("init", "federation.toml")[0] == 0
        self.kits = place / "kits/fedsolve/prod_00"
        self.admin = str(self.kits / ADMIN)
        (place / "server.toml").write_text(ALLOW)
        self.start_server()
        for name in HOSPITALS:
            self.start_site(name)

    def start(self, name, *words):
        with open(self.place / f"{name}.log", "ab") as log:
            self.started[name] = subprocess.Popen(
                [sys.executable, "-m", "fedsolve", "deploy", *words],
                cwd=self.place,
                env=os.environ
                | {
                    "HOME": str(self.place / "home"),
                    "PYTHONPATH": os.pathsep.join([str(self.place), *sys.path]),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self.started[name]

    def command(self, *words):
        """A command to its end: its exit status and what it printed, which is redirected here."""
        log = self.place / "command.log"
        log.unlink(missing_ok=True)
        process = self.start("command", *words)
        try:
            return process.wait(240), log.read_text()
        finally:
            processes.stop([process])

    def start_server(self):
        self.start("server", "server", str(self.kits / "localhost"), "--data", "server.toml")
        wait_until(lambda: self.command("status", "--kit", self.admin)[0] == 0)

    def start_site(self, name, change=lambda arrays: arrays, allow=ALLOW, loader="npz"):
        """Start a hospital, possibly again, with its part of the data, changed."""
        first = 2 * HOSPITALS.index(name)
        data = fs.problems.neyman_pearson(clients=8).samples.values
        own = {k: np.array(v[first : first + 2]) for k, v in data.items()}
        np.savez(self.place / f"{name}.npz", **change(own))
        text = f'[data]\nloader = "{loader}"\npath = "{name}.npz"\n'
        (self.place / f"{name}.toml").write_text(text + allow)
        self.stop(name)
        self.start(name, "site", str(self.kits / name), "--data", f"{name}.toml")
        wait_until(lambda: f"site {name}" in self.command("status", "--kit", self.admin)[1])

    def stop(self, name):
        if name in self.started:
            processes.stop([self.started.pop(name)])

    def words(self, out, run, rounds, *settings):
        base = ["algorithm.participants=8", "deploy.deadline=20.0", "deploy.patience=3.0"]
        changes = [word for s in [*base, *settings] for word in ("--set", s)]
        problem = ["--set", "problem.kind=clinic:screening", "--set", "problem.clients=8"]
        allow = ["--allow", "clinic:screening"]
        submit = ["submit", "neyman-pearson", "--kit", self.admin, "--rounds", str(rounds)]
        return [*submit, *problem, *allow, *changes, "--run", run, "--out", out]

    def submit(self, *settings, rounds=6):
        """Submit a run: exit status, what was printed, `run.json` and the history."""
        self.runs += 1
        out = f"out-{self.runs}"
        status, told = self.command(*self.words(out, f"run-{self.runs}", rounds, *settings))
        return status, told, *self.results(out)

    def results(self, out):
        facts = json.loads((self.place / out / "run.json").read_text())
        path = self.place / out / "history.csv"
        there = path.exists()
        return facts, np.genfromtxt(path, delimiter=",", names=True) if there else None

    def console(self, name):
        return (self.place / f"{name}.log").read_text()

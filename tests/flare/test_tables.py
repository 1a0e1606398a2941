"""One experiment and four site.toml, without code: as a simulation and as a deployment."""

import json
import tomllib
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import tomli_w

import fedsolve as fs
from fedsolve.experiments.config import resolve
from fedsolve.flare.limits import Limits
from fedsolve.flare.preprocessing import Tables, fitted_by, tables_in
from fedsolve.flare.site_checks import checks
from fedsolve.flare.site_config import site_problem
from fedsolve.problems.tables import owners_files, preprocessing_of
from tests.support import examples, hospitals
from tests.support.commands import fedsolve  # noqa: F401
from tests.support.in_process import Wires, deploy

CITIES = ("east", "north", "south", "west")


def four_sites(folder):
    """Four hospitals with files of their own; one has other names, units and words."""
    data = folder / "data"
    data.mkdir()
    hospitals.write(data, sizes=(40, 25, 30, 35))
    for number, city in enumerate(CITIES):
        place = folder / "hospitals" / city
        place.mkdir(parents=True)
        text = (data / f"hospital-{number}.csv").read_text()
        own = '[data]\nloader = "csv"\npath = "patients.csv"\ntest = 0.2\n'
        if city == "west":
            head, _, rest = text.partition("\n")
            head = head.replace("sex,age,", "sex,Alter,").replace("smoker", "raucht")
            text = head + "\n" + rest.replace(",yes\n", ",ja\n").replace(",no\n", ",nein\n")
            own += '[data.columns]\nage = "Alter"\n'
            own += 'smoker = { column = "raucht", words = { ja = "yes", nein = "no" } }\n'
        (place / "patients.csv").write_text(text)
        (place / "site.toml").write_text(own)
    table = {
        "title": "Who dies within 30 days",
        "run": {"rounds": 6, "precision": "float64"},
        "problem": {
            "kind": "tabular",
            "folder": str(folder / "hospitals"),
            "features": hospitals.FEATURES,
            "label": hospitals.LABEL,
            "group": hospitals.GROUP,
            "constraint": {"kind": "equal_opportunity", "at_most": 0.1},
        },
        "algorithm": {"kind": "FedSGM", "step_size": 0.5, "tolerance": 0.01, "local_steps": 2},
    }
    (folder / "study.toml").write_text(tomli_w.dumps(table))
    return folder / "study.toml"


def test_a_simulation_takes_the_sites_own_files(tmp_path, fedsolve, monkeypatch):  # noqa: F811
    experiment = four_sites(tmp_path)
    status, said, told = fedsolve("run", experiment, "--out", "run")
    assert status == 0, told
    assert "Written to run" in said
    kept = json.loads((tmp_path / "run/preprocessing.json").read_text())["seed-0"]
    problem = fs.experiments.resolve("x", tomllib.loads(experiment.read_text())).cells[""][0]
    assert kept["fitted"] == preprocessing_of(problem).fitted
    history = pd.read_csv(tmp_path / "run/history.csv")
    assert history["test_accuracy"].between(0, 1).all()
    # the model predicts new patients as NumPy does, from the kept means and deviations
    (tmp_path / "new.csv").write_text("age,pressure,stage,smoker\n70,130,II,yes\n,,NA,no\n")
    status, said, told = fedsolve("predict", "run", "new.csv")
    assert (status, said) == (0, "Written to predictions.csv: 2 rows\n"), told
    from safetensors.numpy import load_file

    best = load_file(tmp_path / "run/best.safetensors")
    weight, bias = (
        next(v for k, v in best.items() if k.endswith(part)) for part in ("weight", "bias")
    )
    fit = kept["fitted"]
    x = np.zeros((2, 7))
    x[0, :2] = [
        (v - fit[n]["mean"]) / fit[n]["deviation"] for n, v in (("age", 70), ("pressure", 130))
    ]
    x[1, 1] = (120 - fit["pressure"]["mean"]) / fit["pressure"]["deviation"]
    x[0, 3] = x[1, 5] = x[0, 6] = 1
    expected = 1 / (1 + np.exp(-(x @ weight.reshape(-1) + float(bias.reshape(())))))
    found = pd.read_csv(tmp_path / "predictions.csv")
    np.testing.assert_allclose(found["probability"], expected, rtol=1e-5)
    assert found["prediction"].tolist() == np.where(expected > 0.5, "yes", "no").tolist()
    assert found["row"].tolist() == [2, 3]
    # a word that the schema does not know, and a folder that is none
    (tmp_path / "new.csv").write_text("age,pressure,stage,smoker\n70,130,V,yes\n")
    status, _, told = fedsolve("predict", "run", "new.csv")
    assert status == 2
    assert "row 2, column 'stage': 'V' is not one of" in told.replace("\n", " ")
    status, _, told = fedsolve("predict", "nowhere", "new.csv")
    assert status == 2
    assert "is not the folder of a finished run on tables" in told


def test_means_of_a_deployment_are_those_of_the_simulation(tmp_path):
    """The sums that sites send; in one process, where the next test starts real ones."""
    config = tomllib.loads(four_sites(tmp_path).read_text())
    simulated = resolve("x", config).cells[""][0]
    tables = tables_in(config)
    assert isinstance(tables, Tables)
    blank = resolve("x", tables.blank()).cells[""][0]
    assert blank.n == 1
    assert "folder" not in tables.blank()["problem"]
    sums = resolve("sums", tables.sums())
    problem, algorithm = sums.cells[""]
    own = [
        site_problem(problem, path).samples for path in owners_files(config["problem"]["folder"])
    ]
    clients = [
        {k: np.asarray(v[0])[np.asarray(one.mask[0])] for k, v in one.values.items()} for one in own
    ]
    run = fs.solve(
        problem.with_clients(fs.stack_clients(clients)), algorithm, rounds=2, precision="float64"
    )
    found = fitted_by(run, {"missing": {}})
    for name, entry in preprocessing_of(simulated).fitted.items():
        assert found[name] == pytest.approx(entry, rel=1e-13)
    with pytest.raises(fs.InvalidInput, match="need all sites, and south did not answer"):
        fitted_by(run, {"missing": {"south": "it was away"}})
    config["problem"]["fitted"] = found
    assert Tables(config).sums() is None
    assert Tables(config).blank()["problem"]["fitted"] == found


def test_the_files_of_local_sites(tmp_path):
    config = tomllib.loads(four_sites(tmp_path).read_text())
    own = Tables(config).local_sites(4)
    assert [each["data"]["path"] for each in own] == [
        [str(tmp_path / "hospitals" / city / "patients.csv")] for city in CITIES
    ]
    assert own[3]["data"]["columns"]["age"] == "Alter"
    assert own[0]["limits"] == {"samples": 5, "words": True}
    east = tmp_path / "hospitals/east/site.toml"
    east.write_text(east.read_text() + "[limits]\nsamples = 2\nwords = false\n")
    own = Tables(config).local_sites(4)
    assert [each["limits"]["samples"] for each in own] == [2, 5, 5, 5]
    assert not own[0]["limits"]["words"]
    with pytest.raises(fs.InvalidInput, match="has 4 sites; use --local 4"):
        Tables(config).local_sites(2)
    config["problem"]["folder"] = str(tmp_path / "data")
    assert [len(each["data"]["path"]) for each in Tables(config).local_sites(3)] == [1, 1, 2]
    del config["problem"]["folder"]
    with pytest.raises(fs.InvalidInput, match=r"--local needs problem\.folder"):
        Tables(config).local_sites(3)


def test_a_check_has_one_line_for_each_thing(tmp_path, monkeypatch):
    pytest.importorskip("nvflare")
    from fedsolve.flare import site_checks
    from fedsolve.flare.provisioning import make_kits

    config = tomllib.loads(four_sites(tmp_path).read_text())
    kit = make_kits(tmp_path / "kits", "localhost", 8002, ["west"])["west"]
    owners = tmp_path / "hospitals/west/site.toml"
    found = {line.name: line for line in checks(kit, owners, config)}
    assert not found["server"].fits
    assert "No server at localhost:8002" in found["server"].text
    monkeypatch.setattr(site_checks, "check_connection", lambda kit: None)
    found = {line.name: line for line in checks(kit, owners, config)}
    assert all(line.fits for line in found.values()), found
    names = "certificate server version site file schema types words ranges missing values"
    assert " ".join(found) == f"{names} classes sums data"
    assert found["schema"].text.startswith("6 columns, 35 rows in 1 file(s), ")
    table = pd.read_csv(tmp_path / "data/hospital-3.csv", keep_default_na=False)
    died = (table["died"] == "yes").sum()
    assert found["classes"].text == f"no {35 - died}, yes {died}"
    ages = (table["age"] == "").sum()
    assert f"age: {ages}" in found["missing values"].text
    with monkeypatch.context() as full:
        little = SimpleNamespace(available=1000)
        full.setattr(site_checks.psutil, "virtual_memory", lambda: little)
        found = {line.name: line for line in checks(kit, owners, config)}
    assert (found["data"].fits, "and 0 MB are free" in found["data"].text) == (False, True)
    # what does not fit is named with its rows
    text = (tmp_path / "hospitals/west/patients.csv").read_text().splitlines()
    text[1] = text[1].replace(text[1].split(",")[1], "200") if text[1].split(",")[1] else text[1]
    text.append("F,old,no,IV,120,")
    (tmp_path / "hospitals/west/patients.csv").write_text("\n".join(text))
    found = {line.name: line for line in checks(kit, owners, config)}
    assert "row 37, column 'Alter': 'old' is not a number" in found["types"].text
    assert "'IV' is not one of I, II, III" in found["words"].text
    assert "is missing" in found["missing values"].text
    assert not found["data"].fits
    (tmp_path / "hospitals/west/patients.csv").write_text("a\n1\n")
    found = {line.name: line for line in checks(kit, owners, config)}
    assert not found["schema"].fits
    assert "has no column" in found["schema"].text


def test_an_owner_sees_its_held_out_rows(tmp_path):
    """f and accuracy there are those of NumPy; some rounds of many are told, and the last."""
    from fedsolve.flare.held_out import HeldOut, held_out_rows

    config = tomllib.loads(four_sites(tmp_path).read_text())
    del config["problem"]["constraint"]
    problem = resolve("x", config).cells[""][0]
    owners = tmp_path / "hospitals/north/site.toml"
    held = held_out_rows(problem, owners)
    assert held is not None
    data = {k: np.asarray(v)[0] for k, v in held.samples.values.items()}
    rows = int(np.asarray(held.samples.mask).sum())
    assert 0 < rows < 15
    said = []
    seen = HeldOut(held, 40, said.append, np.dtype("float32"))
    w = np.linspace(-1, 1, problem.dimension).astype(np.float32)
    for round in [*range(1, 8), 7, 7, 39, 40, 40]:
        seen(round, jnp.asarray(w))
    assert [int(line.split(",")[0].split()[1]) for line in said] == [2, 4, 6, 40]
    params = problem.params_at(w)
    scores = data["x"] @ np.asarray(params.weight)[0] + float(params.bias[0])
    signs = np.where(data["y"] == 1, -1, 1)
    f = np.log1p(np.exp(signs * scores)).mean()
    right = ((scores > 0) == (data["y"] == 1)).mean()
    expected = f"{rows} held-out rows here: objective {f:.4g}, accuracy {right:.4g}"
    assert said[-1] == f"round 40, {expected}"
    # they may be sent if the owner says so, rounded, and not of few rows
    assert seen(40, jnp.asarray(w)) is None
    few = Limits(samples=rows + 1)
    assert HeldOut(held, 40, said.append, np.dtype("float32"), few)(40, jnp.asarray(w)) is None
    sends = HeldOut(held, 40, said.append, np.dtype("float32"), Limits(digits=2))
    assert sends(3, jnp.asarray(w)) is None
    sent = sends(4, jnp.asarray(w))
    assert sent == sends(4, jnp.asarray(w))
    values = {"objective": float(f"{f:.1e}"), "accuracy": float(f"{right:.1e}")}
    assert sent == {"round": 4, "rows": rows, "values": pytest.approx(values)}
    owners.write_text(owners.read_text().replace("test = 0.2\n", ""))
    assert held_out_rows(problem, owners) is None


def test_a_coordinator_sees_who_is_ready_and_what_owners_allow(tmp_path, monkeypatch):
    """A line before the first round; values on held-out rows of the one site that sends them."""
    problem, algorithm, log = examples.least_squares(), fs.FedAvg(0.1), []

    class Sends(Wires):
        def start(self, site):
            super().start(site)
            if site == "site-2":
                values = {"objective": 0.25, "accuracy": 0.5}
                self.shares[site]._seen = lambda round, w: {
                    "round": int(round),
                    "rows": 7,
                    "values": values,
                }
            if site == "site-3":  # something else in that place is not believed
                self.shares[site]._seen = lambda round, w: {"round": 1, "rows": 2, "values": {}}

    wires = Sends(problem, algorithm, tmp_path)
    wires.lose = lambda site, number: "reply lost" if site == "site-4" else ""
    _, link = deploy(problem, algorithm, wires, tmp_path / "server", 2, log=log)
    ready = "ready: site-1 (2 clients), site-2 (1 client), site-3 (2 clients); not ready: site-4 ("
    assert next(line for line in log if line.startswith("ready")).startswith(ready)
    assert "site-2: round 1, 7 held-out rows: objective 0.25, accuracy 0.5" in log
    record = link.participation.sites
    assert record["site-2"]["held_out"]["round"] == 2
    assert not any("held_out" in record[site] for site in ("site-1", "site-3"))


@pytest.mark.slow  # a server and four sites
def test_four_hospitals_deployed_give_the_simulations_numbers(tmp_path):
    """The same file, `fedsolve run` and `fedsolve deploy --local 4`; no code."""
    import subprocess
    import sys

    pytest.importorskip("nvflare")
    four_sites(tmp_path)
    for words in (["run", "study.toml"], ["deploy", "study.toml", "--local", "4"]):
        done = [sys.executable, "-m", "fedsolve", *words]
        subprocess.run(done, cwd=tmp_path, check=True, timeout=300)
    one, other = (
        pd.read_csv(tmp_path / f"runs/{n}/history.csv") for n in ("study", "study-deployed")
    )
    for name in set(other) - {"clients_evaluated"}:
        np.testing.assert_allclose(one[name], other[name], atol=1e-10, err_msg=name)
    kept = [
        json.loads((tmp_path / f"runs/{n}/preprocessing.json").read_text())["seed-0"]["fitted"]
        for n in ("study", "study-deployed")
    ]
    for name, entry in kept[0].items():
        assert kept[1][name] == pytest.approx(entry, rel=1e-13)

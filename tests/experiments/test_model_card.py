"""Model cards say what the runs have, for every kind of model."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import fedsolve as fs
from fedsolve.experiments import model_card as cards
from fedsolve.experiments.registry import PROBLEMS
from fedsolve.problem.samples import counts
from fedsolve.runtimes.history import History
from tests.support import examples

SMALL = {"problem.clients": 5, "algorithm.participants": 3}


def card_of(table, folder, **options):
    own = [f"{__name__}:{name}" for name in ("torch_problem", "equinox_problem")]
    ready = fs.experiments.resolve("mine", table, own)
    result = fs.experiments.run(ready, out=folder, **options)
    return result, (folder / "model_card.md").read_text(encoding="utf-8")


def rows(card, head):
    """The rows of the tables that begin with this head, as lists of cells."""
    lines = card.splitlines()
    found = []
    for start in (i for i, line in enumerate(lines) if line.startswith(f"| {head} |")):
        for line in lines[start + 2 :]:
            if not line.startswith("|"):
                break
            found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def test_the_card_has_the_runs_numbers(tmp_path):
    table = fs.experiments.read("neyman-pearson") | {
        "title": "Two | ways",
        "variants": {"hard": {"algorithm.switching": "Hard"}, "soft": {}},
    }
    result, card = card_of(table, tmp_path / "x", rounds=6, settings=SMALL | {"run.seeds": [0, 1]})
    assert card.startswith("# Model card: Two \\| ways\n")
    assert card.index("\n# hard\n") < card.index("\n# soft\n")
    problem = result.runs["hard"][0].problem
    assert ["trained and sent", str(problem.dimension)] in rows(card, "numbers")
    assert f"5 clients with {counts(problem.samples).sum()} samples: from " in card
    assert ["participants", "3"] in rows(card, "setting")
    assert ["step_size", f"{float(result.runs['hard'][0].algorithm.step_size):.6g}"] in rows(
        card, "setting"
    )
    assert card.count("Rounds: 6 with seed 0, 6 with seed 1.") == 2
    shown = rows(card, "seed")
    for row, run in zip(shown, [*result.runs["hard"], *result.runs["soft"]], strict=True):
        ends = [run.history[name][-1] for name in ("objective", "constraint")]
        assert row[:3] == [str(run.seed), *(f"{float(end):.6g}" for end in ends)]
        values, tolerance = run.history["constraint"], float(run.algorithm.tolerance)
        share = sum(v > tolerance for v in values) / len(values)
        told = f"the tolerance {tolerance:.6g}; it was over it in {share:.1%} of 6 evaluations"
        assert told in card
        cohort = {i for row in run.history["cohort"] for i in row if 0 <= i < 5}
        assert f"3 of 5 clients in a round; {len(cohort)} took part at least once." in card
    assert f"- Versions: fedsolve {fs.__version__}" in card
    assert not (tmp_path / "x/models").exists()


def test_the_card_has_certificates_and_says_how_a_run_ended(tmp_path):
    table = {
        "problem": {"kind": "neyman_pearson", "clients": 3, "radius": 5.0, "level": 0.05},
        "algorithm": {"kind": "FedSGM.from_theory", "lipschitz": 4.0},
        "run": {"rounds": 5},
    }
    _, card = card_of(table, tmp_path / "x")
    facts = json.loads((tmp_path / "x/run.json").read_text())
    (said,) = facts["certificates"].values()
    assert said in card
    broken = fs.experiments.read("neyman-pearson")
    broken["algorithm"] |= {"step_size": 1e38}
    _, card = card_of(broken, tmp_path / "y", settings=SMALL)
    assert "Status: diverged. " in card


def torch_problem():
    from torch import nn

    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))

    def loss(model, data):
        return ((model(data["x"])[:, 0] - data["y"]) ** 2).mean()

    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((4, 5, 3)), "y": rng.standard_normal((4, 5))}
    data = {name: array.astype(np.float32) for name, array in data.items()}
    return fs.torch.problem(net, loss, data)


def equinox_problem():
    import equinox as eqx
    import jax.numpy as jnp

    def loss(model, data):
        return jnp.mean((jax.vmap(model)(data["x"])[:, 0] - data["y"]) ** 2)

    net = eqx.nn.MLP(3, 1, 2, 1, key=jax.random.key(0))
    data = {"x": np.ones((4, 5, 3), np.float32), "y": np.zeros((4, 5), np.float32)}
    return fs.Problem(loss, data, net, trainable=["layers.1"])


def folder_of(problem, path):
    table = {
        "problem": {"kind": f"{__name__}:{problem}"},
        "algorithm": {"kind": "FedAvg", "step_size": 0.1},
        "run": {"rounds": 2},
    }
    return card_of(table, path / problem)


def test_a_pytorch_model_is_saved_as_its_state_dict(tmp_path):
    torch = pytest.importorskip("torch")
    result, card = folder_of("torch_problem", tmp_path)
    found = load_file(result.folder / "models/seed-0.safetensors")
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
    net.load_state_dict({name: torch.from_numpy(array) for name, array in found.items()})
    for name, array in result.runs[""][0].params.items():
        np.testing.assert_array_equal(net.state_dict()[name], array)
    assert "(PyTorch)" in card
    assert ["0.weight", "[2, 3]", "trained"] in rows(card, "parameter")


def test_fixed_parameters_are_counted_apart(tmp_path):
    result, card = folder_of("equinox_problem", tmp_path)
    assert "MLP (Equinox)." in card
    assert rows(card, "numbers") == [["trained and sent", "3"], ["fixed", "8"]]
    assert ["layers.0.weight", "[2, 3]", "fixed"] in rows(card, "parameter")
    problem = equinox_problem()
    again = fs.models.load(problem.params, result.folder / "models/seed-0.safetensors")
    np.testing.assert_array_equal(
        again.layers[1].weight, result.runs[""][0].params.layers[1].weight
    )


def test_the_share_over_the_tolerance():
    values = np.array([0.2, 0.04, -0.1, 0.06])
    history, shorter = History({"constraint": values}), History({"constraint": values[:3]})
    told = cards._constraint(history, 0.05, None)
    assert told.startswith("the constraint is 0.06 at the end, over the tolerance 0.05; ")
    assert told.endswith("over it in 50.0% of 4 evaluations, at most 0.2.")
    assert "over it in 75.0% of 4 evaluations" in cards._constraint(history, None, None)
    assert "at the end, within 0 (" in cards._constraint(shorter, None, None)


CHEAP = ("linear_regression", "neyman_pearson", "phase_retrieval")


@pytest.mark.parametrize("name", CHEAP)
def test_data_of_every_problem_are_described(name):
    problem = PROBLEMS[name](clients=4)
    text = "\n".join(cards._data(problem, True))
    assert text.startswith("4 clients with ")
    there = "\n".join(cards._data(problem, False))
    assert there == "4 clients. Their data are on the sites of the deployment."


def test_long_settings_and_html_are_shortened():
    problem = examples.least_squares()
    run = fs.solve(problem, fs.FedAvg(0.1), rounds=1)
    assert all(len(value) <= 200 for _, value in cards._settings(run.algorithm))
    assert cards._text("<b>|\n") == "&lt;b>\\| "


def test_a_constraint_over_some_of_the_clients_is_unknown():
    """A deployed run that heard 6 of 8 clients at the end, and all of them before."""
    history = History(
        constraint=np.asarray([0.3, -0.1, -0.2]), clients_evaluated=np.asarray([8, 8, 6])
    )
    for total, shown in ((8, "8"), (None, "more")):
        said = cards._constraint(history, 0.0, {"clients": total})
        assert said.startswith(f"the constraint is -0.2 at the end over 6 of {shown} clients")
        assert "within" not in said
    history["clients_evaluated"] = np.asarray([8, 6, 8])
    said = cards._constraint(history, 0.0, {"clients": 8})
    assert "within the tolerance 0; it was over it in 50.0% of 2 evaluations" in said

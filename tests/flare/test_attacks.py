"""Every attack of `benchmarks/attacks.py`, on a real federation of four hospitals."""

import importlib.util
import re

import pytest

from tests.support.documents import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("flare"),
    pytest.mark.filterwarnings("ignore"),  # FLARE's own
]
NOW = {  # by attack: what its row says
    "none": r"no alarm\. f .* over 8 of 8, exit status 0",
    "a site sends −10 × its reply": r"south: its answer to 'improve' .* \(refused\)",
    "1e4 ×": r"south: its answer to 'improve' .* \(refused\)",
    "1e30 ×": r"south: its answer to 'improve' .* \(refused\)",
    "its first reply": r"south: .* is the same in round after round.* \(noted\)",
    "it says g": r"south: its answer to 'measure' is more than.* over 6 of 8",
    "it claims": r"9000000 clients.*the others played 30 rounds, exit status 3",
    "a curious server": r"\b[01] of 62 were answered",
    "a job that needs": r"more memory than its owner allows|ended without a round",
    "an experiment file": r"was not executed; exit statuses: `run` 2, `show` [02], .* 2",
    "plain connections": r"(\d+) of \1 ports closed",
    "the kit of another": r"not this kit's server.*exit status 2",
    "a second server": r"is running already.*exit status 2",
    "a site is killed": r"Without west.*`incomplete` in run.json, exit status 3",
    "a stolen kit": r"revoke` 0; the thief is not connected.*east, north, south, exit status 0",
}


@pytest.mark.parametrize("first", [0, 5, 10])
def test_every_attack_is_refused_or_noted(first):
    spec = importlib.util.spec_from_file_location("attacks", ROOT / "benchmarks/attacks.py")
    attacks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(attacks)
    assert len(attacks.ATTACKS) == len(NOW) == 15
    table = []
    for row in attacks.rows(attacks.ATTACKS[first : first + 5]):
        print(row, flush=True)
        table.append(row)
    wrong = [
        row
        for row in table[2:]
        if not any(row.startswith(f"| {name}") and re.search(now, row) for name, now in NOW.items())
    ]
    assert not wrong, "\n".join(wrong)
    assert len(table) == 7

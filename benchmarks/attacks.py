"""What happens to a federation of four hospitals under attack: `python benchmarks/attacks.py`.

A server and four sites run in processes of their own, with the owners' commands and mutual TLS.
One site, `south`, lies: its owner's own loader changes what the site answers. The server can be
curious, a job can be too large, a kit can be stolen. Prints a table: attack, before (as an audit
found version 0.1), now. `--tiny` tries two of the attacks, and `--only 0 5` those in these places.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from fedsolve.flare import processes
from fedsolve.flare.provisioning import ADMIN, make_kits
from tests.support.hospital_federation import HOSPITALS, Hospitals

ROUNDS, LIES = 30, 10  # rounds of a run; that from which some lies begin
PAUSE = 15.0  # seconds in which a site is connected
LIAR = "south"
LIAR_CODE = """
import numpy as np
from fedsolve.flare import site
from fedsolve.storage.arrays import decode, encode

FIRST = {}


def again(head, arrays):
    trees = {}
    for name, value in arrays.items():
        prefix, _, number = name.rpartition(".")
        trees.setdefault(prefix, {})[int(number)] = value
    return encode(head, {p: [tree[i] for i in sorted(tree)] for p, tree in trees.items()})


def lied(attack, data):
    head, arrays = decode(data, None)
    arrays = {name: np.array(value) for name, value in arrays.items()}
    late = head.get("round", 0) >= LIES
    if attack == "clients" and "clients" in head:
        head["clients"] = 9_000_000
    for name, value in arrays.items():
        real = np.issubdtype(value.dtype, np.floating)
        update = real and name.startswith("reply") and value.ndim > 1
        if update and attack == "-10":
            value *= -10
        if update and attack in ("1e4", "1e30") and late:
            value *= float(attack)
        if name.startswith("reply") and attack == "first":
            value[...] = FIRST.setdefault((head["exchange"], name), value.copy())
        if attack == "feasible" and real and value.ndim == 1:
            value[...] = -1000.0
    return again(head, arrays)


def data(path):
    attack = (path.parent / "attack").read_text()
    answer = site.SiteClients.answer
    if attack:
        site.SiteClients.answer = lambda self, data: lied(attack, answer(self, data))
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}
""".replace("LIES", str(LIES))
CURIOUS_CODE = """

import json
import os
from pathlib import Path

HERE = Path(__file__).parent


def curious():
    import numpy as np
    from fedsolve.flare import roster
    from fedsolve.storage.arrays import decode, encode

    end_round, asked = roster.Roster.end_round, []

    def then_ask(self, round):
        end_round(self, round)
        if round != 1 or asked:
            return
        size, answered = self.protocol.w.size, 0
        for number in range(62):
            w = np.zeros(size, self.protocol.w.dtype)
            w[number % size] = 1.0 + number
            news = {"want": f"w{number}", "whole": True, "from": [], "packets": []}
            head = {"kind": "evaluate", "round": round + 1, "first": self.ranges["north"][0]}
            told = self._transport({"north": encode(head | {"w": news}, {"w": w})})["north"]
            answered += decode(told, None)[0]["status"] == "ok"
            asked.append(number)
        (HERE / "told.json").write_text(json.dumps(answered))

    roster.Roster.end_round = then_ask


if "/localhost/" in os.environ.get("FEDSOLVE_HOME", "") and (HERE / "curious").exists():
    curious()
"""


class Attacked(Hospitals):
    """Four hospitals, of which one's owner may lie, and a server that may be curious."""

    def __init__(self, place: Path):
        (place / "attack").write_text("")
        (place / "hostile.py").write_text(LIAR_CODE)
        super().__init__(place)
        clinic = place / "clinic.py"
        clinic.write_text(clinic.read_text() + CURIOUS_CODE)
        self.start_site(LIAR, loader="hostile:data")
        self.settings = [f"run.evaluate_every={ROUNDS // 3}"]

    def lie(self, attack: str) -> tuple[int, str, dict, np.ndarray | None]:
        """Submit a run in which the liar attacks."""
        (self.place / "attack").write_text(attack)
        try:
            return self.submit(*self.settings, rounds=ROUNDS)
        finally:
            (self.place / "attack").write_text("")


def told(found: tuple[int, str, dict, np.ndarray | None]) -> str:
    """Describe how a run ended: f, alarms, feasibility, exit status."""
    status, _, facts, history = found
    assert history is not None
    record = facts["participation"]["seed-0"]["sites"]
    alarms = [
        f"{site}: {alarm['why']} ({'refused' if alarm['refused'] else 'noted'})"
        for site in sorted(record)
        for alarm in record[site].get("alarms", [])
    ]
    if history is None:
        return f"no round was played, exit status {status}"
    f, g = (np.atleast_1d(history[name])[-1] for name in ("objective", "constraint"))
    clients = np.atleast_1d(history["clients_evaluated"])[-1]
    end = f"f {f:.3f}, g {g:+.3f} over {clients:.0f} of 8, exit status {status}"
    return f"{'; '.join(alarms) or 'no alarm'}. {end}"


def honest(four: Attacked) -> str:
    return told(four.lie(""))


def too_many_clients(four: Attacked) -> str:
    found = four.lie("clients")
    why = found[2]["participation"]["seed-0"]["sites"][LIAR]["missed"][0]["why"]
    answered = found[2]["participation"]["seed-0"]["sites"]["north"]["answered"]
    return f"“{why}”; the others played {answered} rounds, exit status {found[0]}"


def curious_server(four: Attacked) -> str:
    (four.place / "curious").touch()
    four.submit(*four.settings, rounds=ROUNDS)
    (four.place / "curious").unlink()
    answered = json.loads((four.place / "told.json").read_text())
    run = four.kits / f"north/fedsolve/runs/run-{four.runs}/0/questions.log"
    refused = sum("refused" in line for line in run.read_text().splitlines())
    return f"{answered} of 62 were answered; north's log has {refused} refusals"


def large_job(four: Attacked) -> str:
    files = {name: four.place / f"{name}.toml" for name in HOSPITALS}
    before = {name: file.read_text() for name, file in files.items()}
    for name, file in files.items():  # it is read anew for every job
        file.write_text(before[name] + "[limits]\nmemory = 0.25\n")
    (four.place / "large.toml").write_text(
        '[problem]\nkind = "linear_regression"\nclients = 200\nsize = 5000\n'
        '[algorithm]\nkind = "FedAvg"\nstep_size = 0.1\n[run]\nrounds = 2\n'
        "[deploy]\npatience = 0\n"
    )
    status, said = four.command("submit", "large.toml", "--kit", four.admin, "--out", "large")
    for name, file in files.items():
        file.write_text(before[name])
    lines = [line for line in said.splitlines() if "more memory" in line] or said.splitlines()[-1:]
    return f"“{lines[0][:130]}”, exit status {status}"


def configuration_with_code(four: Attacked) -> str:
    marker = four.place / "executed"
    file = four.place / "evil.toml"
    file.write_text(
        f'[problem]\nkind = "os:system"\ncommand = "touch {marker}"\n'
        '[algorithm]\nkind = "FedAvg"\nstep_size = 0.1\n[run]\nrounds = 2\n'
    )
    ends = []
    for words in (["run", "evil.toml"], ["show", "evil.toml"]):
        done = subprocess.run(
            [sys.executable, "-m", "fedsolve", *words],
            cwd=four.place,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        ends.append(f"`{words[0]}` {done.returncode}")
    status, _ = four.command("submit", "evil.toml", "--kit", four.admin)
    done = "was executed" if marker.exists() else "was not executed"
    return f"it {done}; exit statuses: {', '.join(ends)}, `deploy submit` {status}"


def loopback(four: Attacked) -> str:
    """Try the ports at which processes of the federation listen, as another user would."""
    ports = set()
    for process in four.started.values():
        if process.poll() is not None:
            continue
        command = psutil.Process(process.pid)
        for each in [command, *command.children(recursive=True)]:
            for connection in each.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    ports.add(connection.laddr.port)
    closed = 0
    for port in ports:
        with socket.create_connection(("localhost", port), 5) as plain:
            plain.settimeout(10)
            try:
                plain.sendall(b"\0" * 64)
                closed += plain.recv(1) in (b"", b"\x15")  # an alert of TLS
            except ConnectionError:
                closed += 1
            except TimeoutError:
                pass
    return f"{closed} of {len(ports)} ports closed a connection without a certificate"


def two_servers(four: Attacked) -> str:
    status, said = four.command("server", str(four.kits / "localhost"), "--data", "server.toml")
    why = said.strip().splitlines()[-1].removeprefix("Error: ").split(",")[0]
    return f"“{why}, …”, exit status {status}"


def foreign_administrator(four: Attacked) -> str:
    port = tomllib.loads((four.place / "federation.toml").read_text())["port"]
    kits = make_kits(four.place / "foreign", "localhost", port, ["east"])
    status, said = four.command("status", "--kit", str(kits[ADMIN]))
    return f"“{said.strip().splitlines()[-1].removeprefix('Error: ')}”, exit status {status}"


def killed_site(four: Attacked) -> str:
    four.stop("west")
    status, said, facts, _ = four.submit(*four.settings, rounds=ROUNDS)
    line = next(each for each in said.splitlines() if each.startswith("Without"))
    return f"“{line[:40]}…”, `{facts['status']}` in run.json, exit status {status}"


def stolen_kit(four: Attacked) -> str:
    four.start_site("west")
    stolen = shutil.copytree(four.kits / "west", four.place / "thief/west")
    shutil.rmtree(stolen / "fedsolve")
    status, _ = four.command("revoke", "west", "--kit", four.admin, "--yes")
    four.stop("west")
    thief = four.start("thief", "site", str(stolen), "--data", "west.toml")
    time.sleep(PAUSE)  # it would be connected by then
    here = "site west" in four.command("status", "--kit", four.admin)[1]
    found = four.submit(*four.settings, rounds=ROUNDS)
    sites = found[2]["participation"]["seed-0"]["sites"]
    processes.stop([thief])
    return (
        f"`deploy revoke` {status}; the thief is {'' if here else 'not '}connected, and a run has "
        f"{', '.join(sorted(sites))}, exit status {found[0]}"
    )


Attack = tuple[str, str, Callable[[Attacked], str]]


def lies(attack: str) -> Callable[[Attacked], str]:
    return lambda four: told(four.lie(attack))


ATTACKS: list[Attack] = [
    ("none", "", honest),
    ("a site sends −10 × its reply", "f = 843, no note", lies("-10")),
    (f"1e4 × its reply from round {LIES + 1} on", "poisoned, no note", lies("1e4")),
    (f"1e30 × its reply from round {LIES + 1} on", "poisoned, no note", lies("1e30")),
    ("its first reply for ever", "taken, no note", lies("first")),
    ("it says g = −1000", "“feasible 100 %” where g was 0.115", lies("feasible")),
    ("it claims 9,000,000 clients", "every run ended", too_many_clients),
    ("a curious server evaluates at 62 w", "62 of 62 were answered exactly", curious_server),
    ("a job that needs more memory than allowed", "56 GiB were asked for", large_job),
    (
        "an experiment file with `os:system`",
        "executed by `run` and `show`",
        configuration_with_code,
    ),
    ("plain connections to processes' own ports", "job channels accepted them", loopback),
    ("the kit of another federation's administrator", "no sentence", foreign_administrator),
    ("a second server with the same kit", "both listened, no progress", two_servers),
    ("a site is killed before the run", "exit status 0, no word", killed_site),
    ("a stolen kit", "new kits for everybody", stolen_kit),
]


def rows(attacks: list[Attack]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| attack | before | now |"
    yield "|---|---|---|"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        four = None
        try:
            four = Attacked(Path(folder))
            for name, before, attack in attacks:
                yield f"| {name} | {before} | {attack(four)} |"
        finally:
            processes.stop(list(four.started.values()) if four is not None else [])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Attacks on a federation of four hospitals.")
    parser.add_argument("--tiny", action="store_true", help="two attacks only")
    parser.add_argument("--only", type=int, nargs="+", help="the attacks in these places, from 0")
    words = parser.parse_args()
    places = [1, 9] if words.tiny else words.only or range(len(ATTACKS))
    for row in rows([ATTACKS[place] for place in places]):
        print(row, flush=True)


if __name__ == "__main__":
    main()

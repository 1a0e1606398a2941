"""Members of a secure sum are sites with kits: a server cannot be one, nor invent one."""

import shutil

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.flare.provisioning import ADMIN, make_kits
from fedsolve.flare.signatures import Identity
from fedsolve.flare.site_sums import SiteSums
from fedsolve.storage.arrays import Refused, decode, encode
from tests.support.deployment import certificate_for

pytestmark = pytest.mark.filterwarnings("ignore")  # FLARE's own
NAMES = ["north", "south", "west"]


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    """By name, what each kit signs with; those of the server and the administrator as sites'."""
    home = tmp_path_factory.mktemp("kits")
    kits = make_kits(home / "own", "localhost", 8002, [*NAMES, "late"])
    foreign = make_kits(home / "foreign", "localhost", 8002, ["east"])
    certificate_for(home / "own", kits["late"], "late", -1)
    for name, role in (("localhost", "server"), (ADMIN, "client")):
        startup = kits[name] / "startup"
        for end in ("crt", "key"):
            if role != "client":
                shutil.copy(startup / f"{role}.{end}", startup / f"client.{end}")
        shutil.copy(kits["north"] / "startup/fed_client.json", startup)
    return {name: Identity(kit) for name, kit in ({"east": foreign["east"]} | kits).items()}


def answer(member, head, arrays):
    data = encode(head, arrays)
    try:
        return decode(member.answer(*decode(data, None)), None)
    except Refused as refused:
        return {"status": str(refused)}, {}


def agree(tmp_path, members, change=lambda signed: signed):
    """What the first of some members says to everyone's keys."""
    rule, told = fs.SecureSum(), []
    for number, identity in enumerate(members):
        (tmp_path / str(number)).mkdir(exist_ok=True)
        site = SiteSums(tmp_path / str(number), rule, identity)
        head = {"kind": "keys", "batch": "b", "number": number, "count": 2}
        told.append((site, *answer(site, head, {})))
    numbers = list(range(len(members)))
    head = {"kind": "shares", "batch": "b", "members": numbers, "threshold": len(members)}
    head["signed"] = change([each[1].get("signed") for each in told])
    arrays = {
        "channels": np.stack([each[2]["channel.0"] for each in told]),
        "keys": np.stack([each[2]["keys.0"] for each in told], axis=1),
    }
    return answer(told[0][0], head, arrays)[0]["status"]


def test_sites_accept_each_others_keys(identities, tmp_path):
    assert agree(tmp_path, [identities[name] for name in NAMES]) == "ok"


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ("east", "not signed by a site of this federation"),
        ("south", "a site is a member twice"),
        ("localhost", "localhost is no site"),
        (ADMIN, "is no site"),
        ("late", "certificate of a member has expired"),
        (None, "keys are not signed"),
    ],
)
def test_whoever_is_no_site_is_no_member(identities, tmp_path, other, sentence):
    members = [identities["north"], identities["south"], identities.get(other)]
    assert sentence in agree(tmp_path, members)


def test_keys_under_another_members_signature_are_refused(identities, tmp_path):
    members = [identities[name] for name in NAMES]
    sentence = "not signed by a site of this federation"
    assert sentence in agree(tmp_path, members, lambda s: [s[0], s[2], s[1]])
    assert "not signed" in agree(tmp_path, members, lambda s: s[:2])
    assert "not signed" in agree(tmp_path, members, lambda s: [s[0], s[1], [s[2][0], "xyz"]])
    assert "not signed" in agree(tmp_path, members, lambda s: "no")

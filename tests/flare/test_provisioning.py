"""Kits: new sites and renewed certificates."""

import json
from pathlib import Path

import pytest

import fedsolve as fs
from fedsolve.flare.kit_checks import check_certificate
from fedsolve.flare.provisioning import ADMIN, AUTHORITY, SITES, init
from tests.support.deployment import certificate_for

pytestmark = pytest.mark.filterwarnings("ignore")  # FLARE's own


def made(file, folder):
    return {name: kit.relative_to(folder) for name, kit in init(file, folder).items()}


def test_sites_are_added_and_renewed(tmp_path):
    """By the same authority, without a new kit for anyone else."""
    file, folder = tmp_path / "federation.toml", tmp_path / "kits"
    base = 'server = "localhost"\nsites = ["north"%s]\n'
    file.write_text(base % "")
    north = init(file, folder)["north"]
    with pytest.raises(fs.InvalidInput, match="has kits for all of these"):
        init(file, folder)
    file.write_text(base % ', "south"')
    assert made(file, folder) == {"south": Path("fedsolve/prod_01/south")}
    south = folder / "fedsolve/prod_01/south"
    admin = south.with_name(ADMIN)  # no new kit, but with all names that can be revoked
    assert json.loads((admin / SITES).read_text()) == ["north", "south"]
    roots = [(kit / "startup/rootCA.pem").read_bytes() for kit in (north, south)]
    assert roots[0] == roots[1]
    # A certificate that ends soon is made anew, and only that.
    certificate_for(folder, north, "north", days=30)
    authority = folder / AUTHORITY
    kept = json.loads(authority.read_text())
    kept["north"]["cert"] = (north / "startup/client.crt").read_text()
    authority.write_text(json.dumps(kept))
    assert made(file, folder) == {"north": Path("fedsolve/prod_02/north")}
    check_certificate(folder / "fedsolve/prod_02/north")
    assert authority.stat().st_mode & 0o077 == 0
    (folder / "fedsolve/prod_02/north").rename(tmp_path / "renamed")
    check_certificate(tmp_path / "renamed")  # a kit's folder may be called anything
    (tmp_path / "other").mkdir()
    for text, sentence in [
        ('server = "a"\nsites = "north"\n', "sites must be a list of names"),
        ('sites = ["north"]\n', "needs `server`"),
        (base % "", "is not a folder of kits"),
    ]:
        file.write_text(text)
        with pytest.raises(fs.InvalidInput, match=sentence):
            init(file, tmp_path / "other")

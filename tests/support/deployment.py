"""Experiments, waiting and certificates for tests of the deployment."""

import datetime
import json
import sys
import time

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from fedsolve.experiments import config

# What the sites' processes import by name.
PROBLEM, ALGORITHM = "tests.support.examples:least_squares", "tests.support.deployed:algorithm"


def experiment(rounds, *changes):
    table = config.read("neyman-pearson")
    base = [f"run.rounds={rounds}", "run.precision=float64", "problem.clients=6"]
    for change in [*base, "algorithm.participants=3", *changes]:
        table = config.override(table, change)
    return config.resolve("test", table)


def wait_until(condition, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def as_from_a_shell(words, ignored=False):
    """A command as a terminal starts it, whatever these tests ignore, or as `nohup ... &` does."""
    action = "SIG_IGN" if ignored else "SIG_DFL"
    first = (
        "import os, signal, sys\n"
        f"for each in (signal.SIGINT, signal.SIGHUP): signal.signal(each, signal.{action})\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-c", first, *map(str, words)]


def certificate_for(kits, kit, name, days):
    """A kit's certificate made anew by the federation's own authority."""
    authority = json.loads(next(kits.rglob("cert.json")).read_text())
    root = x509.load_pem_x509_certificate(authority["root_cert"].encode())
    signer = serialization.load_pem_private_key(authority["root_pri_key"].encode(), None)
    key = serialization.load_pem_private_key((kit / "startup/client.key").read_bytes(), None)
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(root.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=90))
        .not_valid_after(now + datetime.timedelta(days=days))
        .sign(signer, hashes.SHA256())
    )
    (kit / "startup/client.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))

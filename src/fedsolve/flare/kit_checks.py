"""Checks of a machine's kit before it is used, so that its owner gets a sentence when it fails.

FLARE itself waits silently when a server does not accept a certificate.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from fedsolve.errors import InvalidInput
from fedsolve.flare.provisioning import kit_name

if TYPE_CHECKING:
    from cryptography import x509


def check_certificate(kit: Path) -> None:
    """Raise if a kit's certificate has expired, belongs to another machine or cannot be read."""
    from cryptography import x509

    certificate = _certificate(kit)
    end = certificate.not_valid_after_utc
    if end < datetime.datetime.now(datetime.UTC):
        raise InvalidInput(
            f"The certificate of {kit_name(kit)} expired on {end:%Y-%m-%d}: make a new kit."
        )
    name = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value
    if name != (own := kit_name(kit)):
        raise InvalidInput(f"This kit belongs to {own}, but its certificate belongs to {name}.")


def certificate_end(kit: Path) -> datetime.datetime:
    """Return when a kit's certificate expires."""
    return _certificate(kit).not_valid_after_utc


def _certificate(kit: Path) -> x509.Certificate:
    from cryptography import x509

    role = "server" if (kit / "startup/server.crt").exists() else "client"
    try:
        data = (kit / "startup" / f"{role}.crt").read_bytes()
        return x509.load_pem_x509_certificate(data)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"Cannot read the certificate of {kit}: {error}.") from error


def server_of(kit: Path) -> str:
    """Return the address of the server of a site or of the administrator."""
    startup = kit / "startup"
    try:
        if (own := startup / "fed_admin.json").exists():
            admin = json.loads(own.read_text())["admin"]
            return f"{admin['host']}:{admin['port']}"
        servers = json.loads((startup / "fed_client.json").read_text())["servers"]
        return str(servers[0]["service"]["target"])
    except (OSError, KeyError, IndexError, ValueError) as error:
        raise InvalidInput(f"{kit} is not a kit of a site or of the administrator: {error}.") from (
            error
        )


def check_connection(kit: Path, timeout: float = 8.0) -> None:
    """Raise if the server cannot be reached or does not accept the certificate of a kit.

    Args:
        kit: The kit of a site or of the administrator.
        timeout: Seconds to wait for the server.
    """
    startup, target = kit / "startup", server_of(kit)
    host, _, port = target.rpartition(":")
    rejects = f"The server at {target} rejects this kit"
    try:
        context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
        context.load_cert_chain(startup / "client.crt", startup / "client.key")
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), timeout) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            secure.settimeout(1.0)  # a server that rejects the certificate does so at once
            with contextlib.suppress(TimeoutError):
                if secure.recv(1) == b"":
                    raise InvalidInput(f"{rejects}'s certificate.")
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message.rstrip(".")
        raise InvalidInput(f"The server at {target} is not this kit's server: {reason}.") from error
    except ssl.SSLError as error:
        reason = (error.reason or "TLS failed").lower().replace("_", " ")
        raise InvalidInput(f"{rejects}: {reason}.") from error
    except TimeoutError as error:
        raise InvalidInput(f"The server at {target} does not speak TLS.") from error
    except OSError as error:
        raise InvalidInput(f"No server at {target}: {error.strerror or error}.") from error

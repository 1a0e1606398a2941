"""Signatures of sites, by the keys of their kits: a server cannot invent members of a secure sum.

A site's kit has its certificate, which the federation's own authority has signed, and its key. Both
are on the site's machine only. Other sites have the authority's certificate in their kits.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from fedsolve.errors import InvalidInput
from fedsolve.storage.arrays import Refused

SCHEME = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
FOREIGN = "the keys of a member are not signed by a site of this federation"
PREFIX = b"fedsolve secure sum: "  # what is signed is nothing else that a kit's key signs


class Identity:
    """What a site signs with, and checks others' signatures by.

    Args:
        kit: The site's kit.

    Raises:
        InvalidInput: If the kit's files cannot be read.
    """

    def __init__(self, kit: Path):
        startup = kit / "startup"
        try:
            self.certificate = (startup / "client.crt").read_text()
            key = serialization.load_pem_private_key((startup / "client.key").read_bytes(), None)
            self._authority = x509.load_pem_x509_certificate((startup / "rootCA.pem").read_bytes())
            servers = json.loads((startup / "fed_client.json").read_text())["servers"]
            self._servers = {str(server.get("identity")) for server in servers}
        except (OSError, ValueError, KeyError) as error:
            raise InvalidInput(f"Cannot read the kit {kit}: {error}.") from error
        if not isinstance(key, rsa.RSAPrivateKey):
            raise InvalidInput(f"The key of the kit {kit} is not of the kind RSA.")
        self._key = key

    def sign(self, data: bytes) -> bytes:
        """Return the signature of this site."""
        return self._key.sign(PREFIX + data, SCHEME, hashes.SHA256())

    def check(self, certificate: str, signature: bytes, data: bytes) -> str:
        """Return the name of the site that has signed the data.

        Args:
            certificate: Its certificate.
            signature: Its signature.
            data: What it is to have signed.

        Raises:
            Refused: If no site of this federation has.
        """
        try:
            found = x509.load_pem_x509_certificate(certificate.encode())
            found.verify_directly_issued_by(self._authority)
            key = found.public_key()
            if not isinstance(key, rsa.RSAPublicKey):
                raise InvalidSignature
            key.verify(signature, PREFIX + data, SCHEME, hashes.SHA256())
        except (InvalidSignature, ValueError, TypeError):
            raise Refused(FOREIGN) from None
        now = datetime.datetime.now(datetime.UTC)
        if not found.not_valid_before_utc <= now <= found.not_valid_after_utc:
            raise Refused("the certificate of a member has expired")
        names = found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        name = str(names[0].value) if names else ""
        # An administrator's certificate names a role.
        if found.subject.get_attributes_for_oid(x509.NameOID.UNSTRUCTURED_NAME) or (
            name in self._servers
        ):
            raise Refused(f"{name[:40]} is no site, and cannot be a member")
        return name

"""Certificates of kits: FLARE fails at a wrong one without a word, so that we look first."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from moretta.deployment import kits
from moretta.errors import ParameterError


def check(kit: Path, now: datetime | None = None) -> None:
    """Raise ParameterError where FLARE would fail at a kit's certificate.

    The certificate is valid at `now` (with a time zone; else the clock's), issued by the kit's root, for the kit's key
    and, at a site, for the kit's name.
    """
    files, now = kits.certificates_of(kit), now or datetime.now(UTC)
    chain = [*kits.chain_in(files.certificate), kits.chain_in(files.root)[0]]
    _check_dates(kit, chain, now)
    try:
        for each, issuer in pairwise(chain):
            each.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise ParameterError(
            f"{files.certificate} was not issued by the root beside it: get both from one federation"
        ) from error
    _check_key(files.key, chain[0])
    if kits.kind_of(kit) != "server" and kits.subject(kit) != kits.name_of(kit):
        raise ParameterError(
            f"{kit} is for {kits.name_of(kit)}, and its certificate for {kits.subject(kit)}: get both from one kit"
        )


def _check_dates(kit: Path, chain: Sequence[x509.Certificate], now: datetime) -> None:
    for each in chain:
        begins, ends = each.not_valid_before_utc, each.not_valid_after_utc
        if now < begins:
            raise ParameterError(
                f"a certificate of {kit} is valid from {begins:%Y-%m-%d %H:%M} UTC, and not now, as this machine's "
                f"clock says {now.astimezone(UTC):%Y-%m-%d %H:%M} UTC: set the clock"
            )
        if now > ends:
            raise ParameterError(
                f"a certificate of {kit} was valid until {ends:%Y-%m-%d}, and not now ({now:%Y-%m-%d}): get a new kit, "
                "or set this machine's clock if it is wrong"
            )


def _check_key(path: Path, certificate: x509.Certificate) -> None:
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ParameterError(f"{path} was expected to be a private key without a password: get a new kit") from error
    if key.public_key() != certificate.public_key():
        raise ParameterError(f"{path} is not the key of the certificate beside it: get both from one kit")


def validity_of(kit: Path) -> tuple[datetime, datetime]:
    """Return from when until when all of a kit's certificates are valid."""
    files = kits.certificates_of(kit)
    chain = [*kits.chain_in(files.certificate), *kits.chain_in(files.root)[:1]]
    return max(each.not_valid_before_utc for each in chain), min(each.not_valid_after_utc for each in chain)

"""Addresses: `127.0.0.1:8000`, or with a scheme; the scheme says whether TLS is used."""

from __future__ import annotations

from dataclasses import dataclass

from client.errors import InvalidInput

_SCHEMES = {"http": ("http", "https"), "grpc": ("grpc", "grpcs")}


@dataclass(frozen=True)
class Address:
    """`host_port` is what tritonclient takes (for HTTP a path may follow); `url` is for messages."""

    host_port: str
    has_tls: bool
    url: str


def parse(url: str, protocol: str) -> Address:
    """Raises InvalidInput for a scheme of another protocol or a missing port."""
    plain, secure = _SCHEMES[protocol]
    scheme, separator, rest = url.rpartition("://")
    if separator and scheme not in (plain, secure):
        raise InvalidInput(f"url must start with {plain}:// or {secure}:// for this client, got {url!r}")
    host_port = rest.rstrip("/")
    port = host_port.split("/", 1)[0].rpartition(":")[2]
    if not port.isdigit() or host_port.startswith(":"):
        raise InvalidInput(f"url must name a host and a port, as in {plain}://127.0.0.1:8000, got {url!r}")
    return Address(host_port, scheme == secure, f"{scheme or plain}://{host_port}")

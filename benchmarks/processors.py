"""Which processor a row is measured on: those of different ones stand beside each other in results.json."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Processor", "here"]

_ISA = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""What decides how fast matrix products are, the best first."""
_MAKERS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Vendor, model, and the best instruction set that matrix products can use."""

    vendor: str
    """As it names itself: AuthenticAMD, GenuineIntel, ..."""
    model: str
    """Its name and numbers, as AMD EPYC (family 25 model 17): a virtual machine may hide the name."""
    isa: str

    @property
    def key(self) -> str:
        """Its name in results.json and on the page."""
        maker = _MAKERS.get(self.vendor, self.vendor)
        named = self.model if maker.lower() in self.model.lower() else f"{maker} {self.model}"
        return f"{named}, {self.isa}"


def here() -> Processor:
    """This machine's; what /proc/cpuinfo does not say is left to `platform`."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    return described(text)


def described(cpuinfo: str) -> Processor:
    """The first processor of a /proc/cpuinfo."""
    said: dict[str, str] = {}
    for line in cpuinfo.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        said[name.strip()] = value.strip()
    flags = set(said.get("flags", "").split())
    name = " ".join(said.get("model name", platform.processor() or platform.machine()).split())
    if "cpu family" in said:
        name = f"{name} (family {said['cpu family']} model {said['model']})"
    isa = next((one for one in _ISA if one in flags), platform.machine())
    return Processor(vendor=said.get("vendor_id", "unknown"), model=name, isa=isa)

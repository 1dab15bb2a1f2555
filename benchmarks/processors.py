"""Which processor a row is measured on: those of different ones stand beside each other in results.json."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Processor", "this_processor"]

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


def this_processor() -> Processor:
    """This machine's; what /proc/cpuinfo does not say is left to `platform`."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    return described(text)


def described(cpuinfo: str) -> Processor:
    """The first processor of a /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in cpuinfo.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = set(fields.get("flags", "").split())
    name = " ".join(fields.get("model name", platform.processor() or platform.machine()).split())
    if "cpu family" in fields:
        name = f"{name} (family {fields['cpu family']} model {fields['model']})"
    isa = next((flag for flag in _ISA if flag in flags), platform.machine())
    return Processor(vendor=fields.get("vendor_id", "unknown"), model=name, isa=isa)

"""What an agent asks a user to do on the phone, by a tool's name or in words, and doing it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stateset_agents.environments.tau2.users.customer import Phone

_MOST = 4
"""Actions that are done at one request."""
_ASK_AGAIN = "Which {missing} do you mean? I can choose from {choices}."

_CHOICES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "set_network_mode_preference": {
        "mode": ("4g_5g_preferred", "4g_only", "3g_only", "2g_only"),
    },
    "grant_app_permission": {
        "app_name": ("messaging", "browser"),
        "permission": ("storage", "sms", "phone", "network"),
    },
    "check_app_status": {"app_name": ("messaging", "browser")},
    "check_app_permissions": {"app_name": ("messaging", "browser")},
}
"""Tool -> argument -> what it can be; the others take none, but for `set_apn_settings`, which asks for more
than a user would type."""

_SWITCHES: Mapping[str, tuple[str, str, str]] = {
    "airplane mode": ("toggle_airplane_mode", "check_network_status", r"Airplane Mode: ON"),
    "wi-?fi calling": ("toggle_wifi_calling", "check_wifi_calling_status", r"\bON\b"),
    "data saver(?: mode)?": ("toggle_data_saver_mode", "check_data_restriction_status", r"\bON\b"),
    "(?:data )?roaming": ("toggle_roaming", "check_network_status", r"Data Roaming Enabled: Yes"),
    "(?:mobile |cellular )data": ("toggle_data", "check_network_status", r"Mobile Data Enabled: Yes"),
    "wi-?fi": ("toggle_wifi", "check_network_status", r"Wi-Fi Radio: ON"),
}
"""In words: what it is called -> the tool that turns it over, the one that shows it, how "on" looks there."""

_WORDS: tuple[tuple[str, str], ...] = (
    (
        r"re-?seat\w* (?:your |the )?sim|(?:remove|take out) and re-?insert (?:your |the )?sim",
        "reseat_sim_card",
    ),
    (r"(?:reboot|restart)\w* (?:your |the )?(?:phone|device)", "reboot_device"),
    (r"reset\w* (?:your |the )?apn", "reset_apn_settings"),
    (r"(?:disconnect|turn off|disable)\w*(?: from)? (?:your |the )?vpn", "disconnect_vpn"),
    (r"(?:make|send) (?:the |your )?payment|pay (?:the |your )?bill|accept the payment", "make_payment"),
    (r"(?:check|see|look at)\w* (?:your |the )?payment request", "check_payment_request"),
    (r"(?:check|see|look at|tell me|what)\b.{0,30}status bar", "check_status_bar"),
    (r"(?:check|see|look at|tell me|what)\b.{0,30}network status", "check_network_status"),
    (r"(?:check|see|look at|tell me|what)\b.{0,30}sim (?:card )?status", "check_sim_status"),
    (r"(?:check|see|look at|tell me|what)\b.{0,30}apn settings", "check_apn_settings"),
    (r"(?:check|see|look at|tell me|what)\b.{0,30}network mode", "check_network_mode_preference"),
    (r"(?:set|change|switch)\w*\b.{0,30}network mode", "set_network_mode_preference"),
    (r"(?:grant|allow|give)\b.{0,40}permission", "grant_app_permission"),
    (r"speed test", "run_speed_test"),
    (r"(?:send|try)\w*\b.{0,30}(?:mms|picture message)", "can_send_mms"),
)
"""In words: a request, and the tool that it means."""


def carry_out(text: str, phone: Phone) -> str | None:
    """Do what was asked for, in the order in which it was, and tell what the phone shows; None where nothing
    was asked for."""
    names = [tool["function"]["name"] for tool in phone.tools]
    named = _named(text, names)
    asked = named or _in_words(text, phone)
    if not asked:
        return None
    shown = []
    for name, arguments in asked[:_MOST]:
        missing = next((argument for argument in _CHOICES.get(name, {}) if argument not in arguments), None)
        if missing is not None:
            choices = ", ".join(_CHOICES[name][missing])
            shown.append(_ASK_AGAIN.format(missing=missing.replace("_", " "), choices=choices))
            continue
        shown.append(phone.call(name, arguments).content)
    return "\n".join(shown)


def _named(text: str, names: list[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """Tools named in the text, each with the arguments that stand before the next one."""
    places = sorted((found.start(), name) for name in names for found in re.finditer(rf"\b{name}\b", text))
    ends = [*(start for start, _ in places), len(text)][1:]
    return [
        (name, _arguments(name, text[start:end])) for (start, name), end in zip(places, ends, strict=True)
    ]


def _in_words(text: str, phone: Phone) -> list[tuple[str, Mapping[str, Any]]]:
    """Requests in plain words; a switch that stands as it should is left alone."""
    found: list[tuple[int, str, Mapping[str, Any]]] = []
    lowered = text.lower()
    for words, tool in _WORDS:
        if (match := re.search(words, lowered)) is not None:
            found.append((match.start(), tool, _arguments(tool, lowered)))
    seen: list[tuple[int, int]] = []
    for thing, (tool, look, on) in _SWITCHES.items():
        verb = re.search(
            r"\b(?:(?:turn|switch)(?:ing)? (?P<way>on|off)"
            rf"|(?P<verb>enable|activate|disable|deactivate|toggle)) (?:the |your )?{thing}\b"
            rf"|\b(?:turn|switch) (?:the |your )?{thing} (?P<after>on|off)\b",
            lowered,
        )
        if verb is None or any(start <= verb.start() < end for start, end in seen):
            continue
        seen.append(verb.span())
        way = verb["way"] or verb["after"] or verb["verb"]
        wanted = None if way == "toggle" else way in ("on", "enable", "activate")
        is_on = re.search(on, phone.call(look, {}).content) is not None
        found.append((verb.start(), look if wanted == is_on else tool, {}))
    return [(name, arguments) for _, name, arguments in sorted(found, key=lambda entry: entry[0])]


def _arguments(tool: str, text: str) -> dict[str, Any]:
    """The first of each argument's choices that the text names."""
    lowered = re.sub(r"\b4g ?[/ ] ?5g\b", "4g_5g", text.lower()).replace("4g_5g preferred", "4g_5g_preferred")
    found = {}
    for argument, choices in _CHOICES.get(tool, {}).items():
        places = {choice: lowered.find(choice) for choice in choices}
        named = [choice for choice in choices if places[choice] >= 0]
        if named:
            found[argument] = min(named, key=places.__getitem__)
    return found

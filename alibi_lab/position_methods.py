"""The position methods of the lab: their names, and their appearance in reports.

A config's `model.method` is a name in this table, `lab/model/positions.py` has a class for each name, and all figures, tables and
style sheets take labels, colors and markers from here. Blue, orange, green, purple, ochre and grey are distinguishable with all
common kinds of color blindness; the other lines differ by their markers and by the names at their ends.
"""

import dataclasses
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Look:
    """A method's name in figures and tables, its color on a light and on a dark page, and its matplotlib marker."""

    label: str
    light: str
    dark: str
    marker: str


LOOKS = {
    "none": Look("no positions", "#5a6272", "#a9b2be", "X"),
    "sinusoidal": Look("sinusoidal", "#0b6fb8", "#5fb3f2", "s"),
    "learned": Look("learned", "#8f6408", "#dfb04c", "v"),
    "rotary": Look("rotary", "#8b3fa8", "#d291ea", "D"),
    "t5": Look("T5 bias", "#097d5d", "#45cfa3", "^"),
    "alibi": Look("ALiBi", "#c63d0c", "#ff8552", "o"),
    "alibi-learned": Look("ALiBi, learned slopes", "#b3156a", "#ff86bd", "P"),
    "alibi-half": Look("half ALiBi, half none", "#7d4a21", "#d3a57c", "p"),
    "kerple": Look("KERPLE-log", "#0c7485", "#5ccbdc", "h"),
    "alibi-log": Look("ALiBi of ln(1 + d)", "#756f0a", "#e8c15a", "d"),
    "alibi-clamp": Look("ALiBi, clamped", "#8f2d1f", "#f09a8c", "H"),
    "sandwich": Look("Sandwich", "#467554", "#9fd3ae", "8"),
    "tisa": Look("TISA", "#6b5b95", "#b9a8e6", "*"),
    "fire": Look("FIRE", "#c2185b", "#ff8fb8", "1"),
    "nope-window": Look("windows and none in turn", "#2f6f8f", "#8cc4e0", "+"),
    "drope": Look("rotary, then dropped", "#98528f", "#dcaaf0", "x"),
    "fox": Look("forget gates", "#3d4fd6", "#93a0ff", "<"),
    "alibi-fox": Look("ALiBi and gates", "#4f7a16", "#a5d063", ">"),
}


def look_of(facts: Mapping[str, object]) -> Look | None:
    """The look that a record stores for a method from outside the package; None if it is missing or invalid."""
    label, light, dark, marker = (facts.get(name) for name in ("label", "light", "dark", "marker"))
    valid = all(isinstance(color, str) and re.fullmatch(r"#[0-9a-fA-F]{6}", color) for color in (light, dark))
    if not (valid and isinstance(label, str) and isinstance(marker, str) and re.fullmatch(r"[\w.,+*<>^|]", marker)):
        return None
    return Look(label, str(light), str(dark), marker)

"""The position methods of the laboratory: what each is called, and how it looks in a report.

The only table of them: a config's `model.method` is one of its names, `lab/model/positions.py` has a class for each, and every
figure, table and style sheet takes label, colors and marker from here. Adding a method touches these two files and no other.
Blue, orange, green, purple, ochre and grey stay apart for every common color blindness; of the others, lines are told apart by
their markers and by the names at their ends.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Look:
    """One method: its name in figures and tables, its color on a light and on a dark page, and matplotlib's marker."""

    label: str
    light: str
    dark: str
    marker: str


METHODS = {
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

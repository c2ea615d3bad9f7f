"""The position methods of the lab, as one table; to add one, write its class and a row.

A config's `model.method` is a name in this table; classes, figures, style sheets and docs/lab.md all follow it. Blue,
orange, green, purple, ochre and grey are distinguishable with all
common kinds of color blindness; the other lines differ by their markers and by the names at their ends.
"""

import dataclasses
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Look:
    """A row of the table.

    Args:
        label: its name in figures and tables.
        light, dark: its color on a light and on a dark page.
        marker: of matplotlib.
        defined: its file in `lab/model` and its class there, as in "distances:Kerple"; "" for a method from outside.
        learned: how many parameters it learns; H heads, N layers, width E, trained length L.
        meaning: where position enters, in Markdown.
    """

    label: str
    light: str
    dark: str
    marker: str
    defined: str = ""
    learned: str = ""
    meaning: str = ""


LOOKS = {
    "none": Look("no positions", "#5a6272", "#a9b2be", "X", "positions:NoPositions", "",
        "nowhere"),
    "sinusoidal": Look("sinusoidal", "#0b6fb8", "#5fb3f2", "s", "positions:Sinusoidal", "",
        "fixed waves, added once (Vaswani et al. 2017)"),
    "learned": Look("learned", "#8f6408", "#dfb04c", "v", "positions:Learned", "L × E",
        "a vector per position, added once; none beyond L"),
    "rotary": Look("rotary", "#8b3fa8", "#d291ea", "D", "rotary:Rotary", "",
        "q and k are rotated by p·10000^(−2c/D) (Su et al. 2021)"),
    "t5": Look("T5 bias", "#097d5d", "#45cfa3", "^", "distances:T5Bias", "32 H",
        "a number per head and distance bucket (Raffel et al. 2020)"),
    "alibi": Look("ALiBi", "#c63d0c", "#ff8552", "o", "positions:ALiBi", "",
        "−m·d, published slopes (Press et al. 2022)"),
    "alibi-learned": Look("ALiBi, learned slopes", "#b3156a", "#ff86bd", "P", "positions:ALiBiLearned", "H",
        "−m·d; ln m is trained, starting from the published slopes"),
    "alibi-half": Look("half ALiBi, half none", "#7d4a21", "#d3a57c", "p", "positions:ALiBiHalf", "",
        "the slopes of H/2 heads, and H/2 heads without position (NAPE, arXiv:2506.16640)"),
    "kerple": Look("KERPLE-log", "#0c7485", "#5ccbdc", "h", "distances:Kerple", "2 H",
        "−r₁·ln(1 + r₂·d) (Chi et al. 2022, arXiv:2205.09921)"),
    "alibi-log": Look("ALiBi of ln(1 + d)", "#756f0a", "#e8c15a", "d", "distances:ALiBiLog", "",
        "−m·ln(1 + d), published slopes (Schröder et al. 2026, arXiv:2608.03994)"),
    "alibi-clamp": Look("ALiBi, clamped", "#8f2d1f", "#f09a8c", "H", "distances:ALiBiClamp", "",
        "max(−m·d, −92.18): no weight is zero in bfloat16 (the same)"),
    "sandwich": Look("Sandwich", "#467554", "#9fd3ae", "8", "distances:Sandwich", "",
        "(Σ_c cos(d / 10000^(2c/128)) − 64) / (8h/H), c = 1 … 64 (Chi et al. 2023, arXiv:2212.10356)"),
    "tisa": Look("TISA", "#6b5b95", "#b9a8e6", "*", "distances:Tisa", "15 N H",
        "Σ_s a·exp(−|b|·(d − c)²), five per layer and head (Wennberg and Henter 2021, arXiv:2106.01950)"),
    "fire": Look("FIRE", "#c2185b", "#ff8fb8", "1", "distances:Fire", "66 + 33 H",
        "a small network of ln(1 + c·d) / ln(1 + c·max(i, θ)) (Li et al. 2024, arXiv:2310.04418)"),
    "nope-window": Look("windows and none in turn", "#2f6f8f", "#8cc4e0", "+", "rotary:NopeWindow", "",
        "every other layer is rotary within L/4 tokens, the others have no positions (arXiv:2504.08719, arXiv:2501.18795)"),
    "drope": Look("rotary, then dropped", "#98528f", "#dcaaf0", "x", "rotary:DroPE", "",
        "rotary, dropped for the last 12 % of training (DroPE, Gelberg et al. 2025, arXiv:2512.12167)"),
    "fox": Look("forget gates", "#3d4fd6", "#93a0ff", "<", "positions:Fox", "N H (E + 1)",
        "Σ ln f over the tokens between, f = sigmoid(w·x + b), in every layer "
        "(Lin et al. 2025, arXiv:2503.02130; [gates](gates.md))"),
    "alibi-fox": Look("ALiBi and gates", "#4f7a16", "#a5d063", ">", "positions:ALiBiFox", "N H (E + 1)",
        "the same − m·d"),
}  # fmt: skip


def look_of(facts: Mapping[str, object]) -> Look | None:
    """The look that a record stores for a method from outside the package; None if it is missing or invalid."""
    label, light, dark, marker = (facts.get(name) for name in ("label", "light", "dark", "marker"))
    valid = all(isinstance(color, str) and re.fullmatch(r"#[0-9a-fA-F]{6}", color) for color in (light, dark))
    if not (valid and isinstance(label, str) and isinstance(marker, str) and re.fullmatch(r"[\w.,+*<>^|]", marker)):
        return None
    return Look(label, str(light), str(dark), marker)

"""Figures in the page's style, one file per subject; `drawing.py` has the axes and the SVG output."""

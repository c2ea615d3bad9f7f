"""Sections of the page: one file each, listed in `SECTIONS` of `page.py`."""

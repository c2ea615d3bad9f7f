"""Reports: records in, pictures out. Nothing is drawn from anything but records; no PyTorch is loaded.

`plot_alibi_bias` draws the heads, `page.write_report` writes the page. Next: `figures.py`.
"""

from alibi_attn.report.heads import plot_alibi_bias

__all__ = ["plot_alibi_bias"]

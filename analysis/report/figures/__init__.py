"""One module per chapter; each function takes data and returns a matplotlib ``Figure``.

Create figures with :func:`analysis.report.style.subplots`, not with ``pyplot``: a figure made there
is unknown to pyplot, so a notebook cell that ends with it shows it once and nothing stays open.
"""

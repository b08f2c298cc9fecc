"""What every figure of a chapter must say, whatever it shows."""

from __future__ import annotations

from matplotlib.figure import Figure

from analysis import style


def check(figure: Figure, x_words: str, y_words: str) -> None:
    """The figure draws, its axes hold these words, and log axes with a name say that they are."""
    across, up = (
        text.get_text() if text else "" for text in (figure._supxlabel, figure._supylabel)
    )
    x_texts = [across, *(axes.get_xlabel() for axes in figure.axes)]
    y_texts = [up, *(axes.get_ylabel() for axes in figure.axes)]
    assert any(x_words in text for text in x_texts), x_texts
    assert any(y_words in text for text in y_texts), y_texts
    scales = {
        (axis.get_scale(), axis.get_label_text())
        for a in figure.axes
        for axis in (a.xaxis, a.yaxis)
    }
    named = [text for scale, text in scales if scale == "log" and text]
    assert all("log scale" in text for text in named), named
    assert len(style.png(figure)) > 5000

import io
import re
import sys
import types

import pytest

from phijax_rng.callbacks import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that only a test moves."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(progress.time, "perf_counter", lambda: Clock.now)
    return Clock


def plain(stream):
    """What is left of a terminal's output without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def test_on_a_terminal_a_bar_shows_steps_loss_and_rate(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    bar = progress.make_progress(True, 50, 200, stream)
    bar.show(100, {"total_loss": 0.25, "pde": 9.0})
    bar.show(150, {"total_loss": 0.125, "skipped_updates": 2})
    bar.close()
    assert isinstance(bar, progress.Bar)
    first, second = plain(stream).replace("\r", "").strip().split("\n")[-2:]
    assert re.search(r"^fit .*150/200 \d+ steps/s", first), first
    assert second.strip() == "total_loss 1.250e-01  skipped_updates 2"
    assert "\x1b[?25h" in stream.getvalue()  # the cursor is shown again


def test_a_bar_says_what_the_run_waits_for_and_for_how_long(monkeypatch, clock):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    bar = progress.make_progress(True, 50, 200, stream)
    for _ in range(2):
        bar.phase("compiling")
        clock.now += 8
    bar.close()
    assert re.search(r"50/200[^\n]*\n *compiling, 16 s", plain(stream).replace("\r", ""))


def test_lines_say_what_takes_longer_than_a_second(clock):
    stream = io.StringIO()
    lines = progress.make_progress(True, 0, 100, stream)
    for _ in range(130):
        lines.phase("compiling")
        clock.now += 0.1
    lines.phase("running")
    clock.now += 1
    lines.show(10, {"total_loss": 0.5})
    lines.close()
    assert stream.getvalue() == (
        "compiling, 1 s\ncompiling, 6 s\ncompiling, 11 s\nstep 10/100  total_loss 5.000e-01\n"
    )


def test_a_long_run_prints_a_line_a_minute(clock):
    stream = io.StringIO()
    lines = progress.make_progress(True, 0, 10**6, stream)
    for step in range(1, 24 * 360 + 1):
        clock.now += 10
        lines.show(step, {})
    # At most one a minute, and a twentieth of the time so far before: 20 minutes have about 55 lines.
    assert 24 * 60 <= stream.getvalue().count("\n") < 24 * 60 + 60


@pytest.fixture
def notebook(monkeypatch):
    """The outputs of a cell: what is shown, each in its newest version."""
    shown = []

    class ZMQInteractiveShell:
        pass

    class Handle:
        def __init__(self, index):
            self.index = index

        def update(self, content, raw):
            assert raw
            shown[self.index] = content

    def display(content, raw, display_id):
        assert raw
        assert display_id
        shown.append(content)
        return Handle(len(shown) - 1)

    ipython, inner = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.get_ipython, inner.display = ZMQInteractiveShell, display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", inner)
    return shown


def test_a_notebook_shows_one_bar_that_moves(notebook, clock, capsys):
    bar = progress.make_progress(True, 50, 200)
    assert isinstance(bar, progress.Notebook)
    bar.phase("compiling")
    clock.now += 3
    bar.phase("compiling")
    assert notebook[0]["text/plain"] == "step 50/200  compiling, 3 s"
    bar.log("continuing from step 50, in <runs>")
    bar.show(100, {"total_loss": 0.25})
    clock.now += 5
    bar.show(150, {"total_loss": 0.125})
    bar.close()
    (content,) = notebook
    assert content["text/plain"] == (
        "continuing from step 50, in <runs>\nstep 150/200  total_loss 1.250e-01  10 steps/s"
    )
    assert "in &lt;runs&gt;" in content["text/html"]
    assert '<progress value="150" max="200"' in content["text/html"]
    assert tuple(capsys.readouterr()) == ("", "")


def test_the_terminal_of_ipython_is_no_notebook(notebook, monkeypatch, capsys):
    sys.modules["IPython"].get_ipython = lambda: None
    assert isinstance(progress.make_progress(True, 0, 100), progress.Lines)
    assert notebook == []


def test_elsewhere_there_is_a_line_every_five_seconds_and_one_at_the_end(clock):
    stream = io.StringIO()
    lines = progress.make_progress(True, 0, 100, stream)
    assert isinstance(lines, progress.Lines)
    for step in range(10, 101, 10):
        clock.now += 2
        lines.show(step, {"total_loss": 1 / step})
    assert stream.getvalue().count("\n") == 3
    lines.close()
    assert stream.getvalue() == (
        "step 30/100  total_loss 3.333e-02  5 steps/s\n"
        "step 60/100  total_loss 1.667e-02  5 steps/s\n"
        "step 90/100  total_loss 1.111e-02  5 steps/s\n"
        "step 100/100  total_loss 1.000e-02  5 steps/s\n"
    )


def test_a_line_is_printed_once(clock):
    stream = io.StringIO()
    lines = progress.make_progress(True, 0, 100, stream)
    clock.now += 6
    lines.show(10, {"fit": 1.0})
    lines.close()
    lines.close()
    assert stream.getvalue() == "step 10/100  fit 1.000e+00\n"


def test_the_rate_excludes_the_compilation(clock):
    stream = io.StringIO()
    lines = progress.make_progress(True, 0, 1000, stream)
    clock.now += 300
    lines.show(1, {})
    clock.now += 6
    lines.show(601, {})
    assert stream.getvalue().split("\n")[1] == "step 601/1000  100 steps/s"


def test_a_message_is_on_a_separate_line(clock, monkeypatch):
    stream = io.StringIO()
    lines = progress.make_progress(True, 0, 100, stream)
    lines.log("continuing from step 7")
    lines.show(10, {"fit": 1.0})
    lines.log("step 10 saved")
    lines.close()
    assert stream.getvalue() == "continuing from step 7\nstep 10/100  fit 1.000e+00\nstep 10 saved\n"
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    bar = progress.make_progress(True, 0, 100, terminal)
    bar.log("continuing from step 7")
    bar.close()
    assert "continuing from step 7\n" in plain(terminal)
    progress.make_progress(False, 0, 100, stream).log("nothing")
    assert "nothing" not in stream.getvalue()


def test_a_run_without_an_update_prints_nothing(clock):
    stream = io.StringIO()
    progress.make_progress(True, 100, 100, stream).close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "elsewhere"])
def test_nothing_is_shown_when_it_is_switched_off(stream):
    shown = progress.make_progress(False, 0, 100, stream)
    shown.show(10, {"fit": 1.0})
    shown.close()
    assert stream.getvalue() == ""


def test_the_standard_stream_is_that_of_errors(capsys):
    lines = progress.make_progress(True, 0, 100)
    lines.show(10, {"fit": 1.0})
    lines.close()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "step 10/100  fit 1.000e+00\n")

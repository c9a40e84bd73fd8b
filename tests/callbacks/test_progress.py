import io
import re

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
    bar.show(150, {"total_loss": 0.125, "pde": 9.0})
    bar.close()
    assert isinstance(bar, progress.Bar)
    last = plain(stream).strip().split("\r")[-1].split("\n")[-1]
    assert re.search(r"^fit .*150/200 total_loss 1\.250e-01  \d+ steps/s", last), last
    assert "9.000" not in plain(stream)
    assert "\x1b[?25h" in stream.getvalue()  # the cursor is shown again


def test_a_bar_shows_compiling_before_the_first_step(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress.make_progress(True, 50, 200, stream).close()
    assert re.search("50/200 compiling", plain(stream))


def test_elsewhere_there_is_a_line_every_five_seconds_and_one_at_the_end(clock):
    stream = io.StringIO()
    lines = progress.make_progress(True, 0, 100, stream)
    assert isinstance(lines, progress.Lines)
    for step in range(10, 101, 10):
        clock.now += 2
        lines.show(step, {"total_loss": 1 / step, "pde": 9.0})
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

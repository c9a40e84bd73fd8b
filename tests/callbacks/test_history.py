"""Rows by step that go through a checkpoint unchanged."""

import json
import math

import pytest

from phijax_rng.callbacks.history import History


def make():
    history = History()
    history.add(10, {"loss": 0.5, "pde": 0.25})
    history.add(15, {"loss": 0.1 + 0.2, "pde": 1e-30, "evaluation/error": 3.0})
    history.add(20, {"loss": float("nan"), "pde": 2.0})
    history.add(20, {"a, b": 1.0})
    return history


def test_rows_begin_with_their_step_and_follow_the_columns():
    history = make()
    assert len(history) == 3
    assert history.names == ["loss", "pde", "evaluation/error", "a, b"]
    assert [list(row) for row in history] == [
        ["step", "loss", "pde"],
        ["step", "loss", "pde", "evaluation/error"],
        ["step", "loss", "pde", "a, b"],
    ]
    assert history[-1]["step"] == 20
    assert [row["step"] for row in history[1:]] == [15, 20]
    assert [row["step"] for row in history.after(10)] == [15, 20]
    assert list(history.after(20)) == []


def test_a_history_comes_back_from_json_and_goes_on():
    history, again = make(), History.from_plain(json.loads(json.dumps(make().plain())))
    for each in (history, again):
        each.add(30, {"pde": 7.0, "new": -0.0})
    assert again.plain()["names"] == history.plain()["names"]
    assert repr(list(again)) == repr(list(history))
    assert math.isnan(again[2]["loss"])
    assert [again.csv_row(i) for i in range(4)] == [history.csv_row(i) for i in range(4)]
    assert History.from_plain({}).plain() == {"names": [], "rows": []}


def test_later_rows_do_not_change_a_plain_copy():
    history = make()
    told = history.plain()
    history.add(20, {"late": 1.0})
    history.add(25, {"late": 2.0})
    assert json.dumps(told) == json.dumps(make().plain())


def test_a_table_reads_back_to_the_same_bits():
    history = make()
    assert history.csv_header() == 'step,loss,pde,evaluation/error,"a, b"\n'
    assert history.csv_row(1) == "15,0.30000000000000004,1e-30,3.0,\n"
    assert history.csv_row(2) == "20,nan,2.0,,1.0\n"


def test_rows_are_added_in_order():
    with pytest.raises(ValueError) as caught:
        make().add(19, {"loss": 1.0})
    assert str(caught.value) == "step must not be before the last row, 20, got 19. Add rows in order."

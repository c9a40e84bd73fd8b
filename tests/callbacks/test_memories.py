"""The memory of one callback never goes to another."""

import dataclasses
import itertools

import pytest

from phijax_rng import Checkpoints, CSVHistory, EarlyStopping
from phijax_rng.callbacks.memories import assigned, settings_of
from phijax_rng.callbacks.protocol import adapt_callbacks
from phijax_rng.callbacks.runner import CallbackRunner
from tests import _problems
from tests._fit import fit, resumed
from tests.callbacks._events import make_event


@dataclasses.dataclass(frozen=True)
class Count:
    """Counts its calls."""

    label: str
    every_n_steps: int = 2

    def __call__(self, event):
        event.memory["calls"] = [*event.memory.get("calls", []), f"{self.label}{event.step}"]


A, B, C = Count("a"), Count("b"), Count("c")


def saved(*callbacks):
    runner = CallbackRunner(adapt_callbacks(callbacks), {})
    runner.call(make_event(2))
    return runner.memories(), runner.settings()


def labels(callbacks, memories, settings):
    adapted = adapt_callbacks(callbacks)
    found = assigned(adapted, memories, settings)
    return {c.callback.label: found[c.name]["calls"][0][0] for c in adapted if c.name in found}


@pytest.mark.parametrize(
    "now",
    [p for n in (1, 2, 3) for p in itertools.permutations((A, B, C), n)],
    ids=lambda p: "".join(c.label for c in p),
)
@pytest.mark.parametrize("before", [(A, B), (A, B, C), (B, A)], ids=lambda p: "".join(c.label for c in p))
def test_each_gets_its_own_whatever_was_removed_added_or_moved(before, now):
    memories, settings = saved(*before)
    new = [c for c in now if c not in before]
    lost = [c for c in before if c not in now]
    if new and lost:
        with pytest.raises(ValueError, match=r"^\d callbacks named 'Count' were saved and \d are given"):
            labels(now, memories, settings)
    else:
        own = {c.label: c.label for c in now if c in before}
        assert labels(now, memories, settings) == own


def test_one_callback_keeps_its_memory_with_other_settings():
    memories, settings = saved(A)
    assert labels((B,), memories, settings) == {"b": "a"}


def test_a_second_one_in_front_does_not_take_the_memory():
    memories, settings = saved(A)
    assert labels((B, A), memories, settings) == {"a": "a"}


def test_of_twins_none_may_go():
    memories, settings = saved(A, A)
    assert labels((A, A), memories, settings) == {"a": "a"}
    with pytest.raises(ValueError, match=r"^2 callbacks named 'Count' were saved and 1 are given"):
        labels((A,), memories, settings)


def test_without_settings_the_order_counts_and_a_missing_one_is_refused():
    """As version 0.1.0 saved them."""
    memories, _ = saved(A, B)
    assert labels((A, B), memories, {}) == {"a": "a", "b": "b"}
    with pytest.raises(ValueError, match="Give each of them a name, or pass those of the saved run"):
        labels((B,), memories, {})
    only_second = {"Count#2": {"calls": ["b2"]}}
    with pytest.raises(ValueError, match="callbacks named 'Count'"):
        labels((B,), only_second, {})


def test_settings_are_those_of_the_object_and_not_its_address():
    one, other = (adapt_callbacks([EarlyStopping("loss", patience=5)])[0] for _ in range(2))
    assert settings_of(one) == settings_of(other)
    assert settings_of(adapt_callbacks([EarlyStopping("loss", patience=6)])[0]) != settings_of(one)


def test_a_run_resumes_each_memory(tmp_path):
    problem = _problems.dropout()
    fit(problem, 4, tmp_path, trainer={"callbacks": [A, B]})
    with pytest.raises(ValueError, match="2 callbacks named 'Count' were saved and 1 are given"):
        resumed(problem, 6, tmp_path, trainer={"callbacks": [C]})
    resumed(problem, 6, tmp_path, trainer={"callbacks": [B]})
    assert Checkpoints(tmp_path).memory()["callbacks"] == {"Count": {"calls": ["b2", "b4", "b6"]}}


def test_a_fresh_run_does_not_overwrite_the_history_of_another(tmp_path):
    problem, path = _problems.dropout(), tmp_path / "history.csv"
    options = {"callbacks": [CSVHistory(path, every_n_steps=2)], "log_every_n_steps": 1}
    fit(problem, 4, tmp_path / "one", trainer=options)
    before = path.read_bytes()
    message = (
        r"history\.csv has the history of a run, and this call would start another one\. Name another path"
    )
    for folder in (tmp_path / "two", None):
        with pytest.raises(FileExistsError, match=message):
            fit(problem, 4, folder, trainer=options)
    # A run that continues another one's state is another run.
    with pytest.raises(FileExistsError, match=message):
        fit(problem, 6, tmp_path / "two", trainer=options, ckpt_path=tmp_path / "one")
    assert path.read_bytes() == before
    resumed(problem, 6, tmp_path / "one", trainer=options)
    assert len(path.read_bytes().splitlines()) == 7
    # The same command line after a kill before the first save.
    resumed(problem, 4, tmp_path / "three", trainer=options)
    assert path.read_bytes() == before

"""The first steps of the shipped examples are clean, audited with the arguments that they pass to `fit`."""

from typing import Any

import pytest

from phijax_rng import Trainer, audit
from tests._subprocess import ROOT


class Captured(Exception):  # noqa: N818 - no error: it carries the arguments of `fit` out of an example
    """The arguments of `fit` in an example."""


def executed(name: str, *, before: str | None = None) -> dict[str, Any]:
    """The names of an example, run up to the line that starts with `before`."""
    path = ROOT / "examples" / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    head = text if before is None else text[: text.index(f"\n{before}")]
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(head, str(path), "exec"), names)
    return names


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "drawn_by"),
    [("heat", {"normal", "randint"}), ("burgers", None), ("dropout", {"normal", "randint", "bernoulli"})],
)
def test_a_trained_example_is_clean(name: str, drawn_by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(trainer: Trainer, module: Any, **arguments: Any) -> None:
        raise Captured(module, arguments)

    monkeypatch.setattr(Trainer, "fit", capture)
    with pytest.raises(Captured) as captured:
        executed(name)
    module, arguments = captured.value.args
    wanted = {k: v for k, v in arguments.items() if k in ("datamodule", "optimizer", "seed", "balancer")}
    report = Trainer(2, progress=False).audit(module, **wanted, steps=2)
    assert report.clean, str(report)
    assert report.findings == (), str(report)
    assert drawn_by is None or {draw.primitive for draw in report.draws} >= drawn_by
    assert all(key.startswith("root.") for draw in report.draws for key in draw.keys)


@pytest.mark.full
def test_the_example_with_its_own_loop_is_clean() -> None:
    example = executed("custom_loop", before="uninterrupted =")
    report = audit(lambda: example["train"](*example["start"](7), stop=2))
    assert report.clean, str(report)
    assert {draw.primitive for draw in report.draws} == {"normal", "randint"}

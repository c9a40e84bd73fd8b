"""Where a run ends: after so many steps, or so many passes over its finite pools."""

from collections.abc import Mapping

from phijax_rng._base import validation
from phijax_rng._base.types import BatchSize
from phijax_rng.sampling.adapters import AdaptedSource, adapt_sampler


def check_limits(max_steps: int | None, max_epochs: int | Mapping[str, int] | None) -> None:
    """Raises unless a run with these limits ends."""
    if max_steps is None and max_epochs is None:
        raise TypeError("pass max_steps or max_epochs, got neither.")
    if max_steps is not None:
        validation.step_number(max_steps, "max_steps")
    if isinstance(max_epochs, Mapping):
        if len(max_epochs) != 1:
            raise ValueError(
                f"max_epochs must name one sampler, got {validation.shown(max_epochs)}. "
                "Pass {name: epochs} for the one whose epochs count."
            )
        for name, epochs in max_epochs.items():
            validation.positive(epochs, f"max_epochs[{name!r}]")
    elif max_epochs is not None:
        validation.positive(max_epochs, "max_epochs")


def last_step(
    max_steps: int | None, max_epochs: int | Mapping[str, int] | None, source: AdaptedSource
) -> int:
    """The step at which training ends: of both limits the lower.

    An epoch of a sampler is as many rows as its pool has, so with `order="shuffled"` each of them once. The
    last batch is whole: it reaches into the next epoch where the rows do not divide by the batch size.

    Raises:
        ValueError: no sampler has a finite pool, or their epochs differ and none is named.
    """
    if max_epochs is None:
        assert max_steps is not None
        return max_steps
    sizes = {name: _rows(source, name, size) for name, size in source.batch_sizes.items()}
    finite = {name: rows for name, rows in sizes.items() if rows is not None}
    if isinstance(max_epochs, Mapping):
        ((name, epochs),) = max_epochs.items()
        if name not in finite:
            raise ValueError(
                f"max_epochs names {name!r}, and the samplers with finite pools are "
                f"{validation.shown(finite)}. Name one of them, or pass max_steps."
            )
        finite = {name: finite[name]}
    else:
        epochs = max_epochs
    if not finite:
        raise ValueError(
            "max_epochs needs a sampler with a finite pool, and the source has none. Pass max_steps."
        )
    if len({rows / size for rows, size in finite.values()}) > 1:
        each = ", ".join(f"{name!r}: {rows} rows by {size}" for name, (rows, size) in finite.items())
        first = next(iter(finite))
        raise ValueError(
            f"max_epochs needs one length of an epoch, and the samplers have {each}. "
            f"Name the one that counts, as in max_epochs={{{first!r}: {epochs}}}."
        )
    rows, size = next(iter(finite.values()))
    steps = validation.step_number(-(-epochs * rows // size), "the steps of max_epochs")
    return steps if max_steps is None else min(steps, max_steps)


def _rows(source: AdaptedSource, name: str, size: BatchSize) -> tuple[int, int] | None:
    """Rows of a sampler's pool and of its batch; `None` where it draws from no pool."""
    rows = adapt_sampler(source.samplers[name], f"samplers[{name!r}]").num_rows
    return None if rows is None else (rows, rows if size == "all" else int(size))

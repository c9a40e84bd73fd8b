"""Which key draws what, at which line.

    report = audit(train_step, state, batch, names={"root": root})
    print(report)             # findings first, then every draw with the name of its key and its line
    assert report.clean

The function runs op by op, as under `jax.disable_jit`, and every random primitive of JAX is recorded: through
`jit`, `grad`, `vmap`, `scan`, `while_loop`, `cond`, `checkpoint` and custom derivatives, in any library. Keys
are compared by their bits, so the audit recognizes one key under two names. A region that it cannot observe
is listed as not seen, and a report with such a region is not clean.

This is slow, because JAX compiles every small operation the first time: audit two or three small steps.
Nothing in JAX is replaced before `audit` is called, and everything is restored when it ends.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from phijax_rng._base import validation
from phijax_rng.auditing.audit_report import AuditReport


def audit(
    fn: Callable[..., Any],
    *args: Any,
    names: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
) -> AuditReport:
    """Runs `fn(*args)` and reports every draw, with the name of its key and the line of the call.

    Keys in the arguments have the name of their parameter (`key`, `state.rng_key`), keys that `fn` closes
    over that of their variable, and all others that of their derivation: `key.split(3)[0].fold_in(7)`.

    Args:
        fn: any function; it runs once, with its side effects.
        *args: its arguments.
        names: name -> key, array of keys, or pytree of keys; these names win in the report.
        allow: names of keys whose faults are intended and become notes, with those of every key derived
            from them; `*` matches anything.

    Returns:
        The report; `report.result` is what `fn` returned.

    Raises:
        TypeError: `fn` is not callable, or `names` does not map names to keys.
        RuntimeError: another audit runs in this process, or JAX lacks a private name that the audit uses.
        Exception: whatever `fn` raises, after JAX is restored.
    """
    # The recorder and the hooks into JAX load only here: they depend on private names of JAX, and an
    # `import phijax_rng` must not fail or slow down because of them.
    from phijax_rng.auditing.session import Session  # noqa: PLC0415

    session = Session(names=names, allow=allow)
    session.add_inputs(validation.function(fn, "fn"), args)
    with session.observing():
        result = fn(*args)
    return session.report(result)

"""The command line.

    phijax-rng inspect RUN          steps, sizes, contract, history
    phijax-rng compare RUN RUN      where two runs part: status 0 equal, 1 different, 2 not comparable
    phijax-rng tree SEED            which key comes from which
    phijax-rng doctor [RUN]         what decides bits on this machine, and what to change
    phijax-rng exec --deterministic -- COMMAND
    phijax-rng clean RUN            deletes superseded steps, after a question

Nothing of a run is executed. A mistake is one line on standard error and status 2.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from phijax_rng import determinism
from phijax_rng.checkpoints.manager import Checkpoints
from phijax_rng.cli.doctor import diagnose
from phijax_rng.cli.inspection import inspect_run
from phijax_rng.cli.key_tree import key_tree
from phijax_rng.replay.compare import compare_runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: of the command line; those of this process for `None`.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # of any type: no file of a run may end in a traceback
        print(f"phijax-rng: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="phijax-rng", description="Looks at runs, keys and machines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int], help: str, example: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=help,
            description=help,
            epilog=f"example: phijax-rng {name} {example}",
        )
        added.set_defaults(run=run)
        return added

    inspect = command("inspect", _inspect, "Shows what is in a run directory.", "runs/heat --step 5000")
    inspect.add_argument("directory", help="directory of a run")
    inspect.add_argument("--step", type=int, help="whose contract and history to show; the newest by default")
    inspect.add_argument("--verify", action="store_true", help="read all arrays and compare their digests")
    compare = command("compare", _compare, "Says where two runs part.", "runs/a runs/b")
    compare.add_argument("a", help="directory of a run")
    compare.add_argument("b", help="directory of another")
    tree = command("tree", _tree, "Shows which key of a run comes from which.", "42 --samplers pde walls")
    tree.add_argument("seed", type=int)
    tree.add_argument("--steps", type=int, default=3, help="so many steps, from 0 on (3)")
    tree.add_argument("--samplers", nargs="+", default=(), help="names of the samplers, as declared")
    doctor = command("doctor", _doctor, "Says what decides bits here, and what to change.", "runs/heat")
    doctor.add_argument("directory", nargs="?", help="where a run is to live")
    for one in (inspect, compare, tree, doctor):
        one.add_argument("--json", action="store_true", help="print JSON")
    execute = command(
        "exec", _exec, "Runs a command with XLA's flags set.", "--deterministic -- python train.py"
    )
    execute.add_argument("--deterministic", action="store_true", required=True, help="as on the page on GPUs")
    execute.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")
    clean = command("clean", _clean, "Deletes the superseded steps of a run.", "runs/heat")
    clean.add_argument("directory", help="directory of a run")
    clean.add_argument("--yes", action="store_true", help="without the question")
    return parser


def _show(found: Any, options: Any) -> None:
    if not options.json:
        print(found)
        return
    # JSON has no numbers that are not finite: they become text.
    plain = json.loads(json.dumps(found.plain(), default=str), parse_constant=str)
    print(json.dumps(plain, indent=2, allow_nan=False))


def _inspect(options: Any) -> int:
    found = inspect_run(options.directory, options.step, verify=options.verify)
    _show(found, options)
    return 0 if found.intact else 1


def _compare(options: Any) -> int:
    found = compare_runs(options.a, options.b)
    _show(found, options)
    return 0 if found.equal else 1 if found.comparable else 2


def _tree(options: Any) -> int:
    _show(key_tree(options.seed, options.steps, tuple(options.samplers)), options)
    return 0


def _doctor(options: Any) -> int:
    found = diagnose(options.directory)
    _show(found, options)
    return 1 if found.advice else 0


def _exec(options: Any) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command or shutil.which(command[0]) is None:
        raise ValueError(f"{command[0] if command else 'nothing'!r} is no command. Write it after --.")
    os.environ["XLA_FLAGS"] = determinism.deterministic_xla_flags()
    sys.stdout.flush()
    os.execvp(command[0], command)
    return 0


def _clean(options: Any) -> int:
    run = Checkpoints(options.directory)
    run.existing()
    left = run.directory / "superseded"
    names = sorted(path.name for path in left.iterdir()) if left.is_dir() and not left.is_symlink() else []
    if not names:
        print(f"{run.directory} has no superseded steps")
        return 0
    print(f"superseded in {run.directory}: {', '.join(names)}")
    if not options.yes and input("Delete them? [y/N] ").strip().lower() not in ("y", "yes"):
        print("nothing was deleted")
        return 1
    with run:
        run.lock()  # a run that trains may set steps aside at this moment
        for name in names:
            path = left / name
            path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
    print(f"deleted {len(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from phijax_rng import (
    NamedBatchSource,
    RandomRowSampler,
    SpaceTimeSampler,
    UniformDomainSampler,
    keys,
)
from phijax_rng.checkpoints import document
from phijax_rng.errors import CheckpointMismatchError, DamagedCheckpointError
from phijax_rng.resume import contract, run_contract

STREAMS = keys.split_root(7)
TRAINING = {
    "module": "LossModule",
    "losses": ["pde", "bc"],
    "balancer": None,
    "optimizer": ["ScaleByAdamState"],
    "on_nonfinite": "raise",
    "program": "1" * 64,
}
ENVIRONMENT = run_contract.describe_environment(jax.devices()[0])
ROWS = {"inputs": np.zeros((6, 2), np.float32)}


def source(**sizes):
    samplers = {
        "bc": RandomRowSampler(ROWS, replace=False),
        "pde": UniformDomainSampler([(0.0, 1.0), (-1.0, 2.4)]),
        "ic": SpaceTimeSampler(ROWS, (0.0, 0.5)),
    }
    sizes = {"bc": 3, "pde": 4, "ic": 5} | sizes
    return NamedBatchSource({name: samplers[name] for name in sizes}, sizes, STREAMS.sampling)


def build(**changes):
    arguments = {
        "root": keys.root_key(7),
        "sampling_key": STREAMS.sampling,
        "balancer_key": STREAMS.balancer,
        "source": source(),
        "training": TRAINING,
        "environment": ENVIRONMENT,
    }
    return contract.build(**arguments | changes)


def training(**changes):
    return {name: value for name, value in (TRAINING | changes).items() if value is not ABSENT}


def elsewhere(section, **changes):
    return {**ENVIRONMENT, section: ENVIRONMENT[section] | changes}


ABSENT = object()


def read_back(record):
    return json.loads(json.dumps(record))


def test_a_contract_that_was_read_back_differs_in_nothing():
    assert contract.compare(read_back(build()), build()) == []


def test_a_contract_holds_fingerprints_sources_training_and_environment():
    record = build()
    assert list(record) == [
        "schema",
        "derivation",
        "keys",
        "source",
        "training",
        "versions",
        "settings",
        "machine",
    ]
    assert record["keys"]["root"] == "threefry2x32:0-7"
    assert record["keys"]["sampling"] == keys.fingerprint(STREAMS.sampling)
    assert record["keys"]["balancer"] == keys.fingerprint(STREAMS.balancer)
    assert [sampler["name"] for sampler in record["source"]["samplers"]] == ["bc", "pde", "ic"]
    assert record["keys"]["source"] == keys.fingerprint(STREAMS.sampling)
    assert record["training"] == TRAINING
    assert set(record["versions"]) == {"jax", "jaxlib", "optax", "numpy", "orbax-checkpoint", "phijax-rng"}
    assert record["versions"]["numpy"] == np.__version__


@pytest.mark.parametrize("seed", [np.uint64(7), np.int32(7)], ids=["uint64", "int32"])
def test_seeds_that_are_one_root_have_one_contract(seed):
    assert build(root=keys.root_key(seed)) == build()


OTHER = keys.split_root(8)


@pytest.mark.parametrize(
    ("changes", "settings", "survives"),
    [
        ({"root": keys.root_key(8)}, ["keys.root"], "none"),
        ({"sampling_key": OTHER.sampling}, ["keys.sampling"], "none"),
        ({"balancer_key": OTHER.balancer}, ["keys.balancer"], "none"),
        ({"source": source(pde=9)}, ["source.samplers.pde.size"], "keys"),
        ({"training": training(losses=["bc", "pde"])}, ["training.losses"], "batches"),
        ({"training": training(on_nonfinite="skip")}, ["training.on_nonfinite"], "batches"),
        ({"training": training(program="2" * 64)}, ["training.program"], "batches"),
        (
            {"environment": elsewhere("settings", jax_enable_x64=None)},
            ["settings.jax_enable_x64"],
            "batches",
        ),
        ({"environment": elsewhere("versions", numpy=None)}, ["versions.numpy"], "rounding"),
        ({"environment": elsewhere("machine", processes=2)}, ["machine.processes"], "rounding"),
    ],
    ids=[
        "root",
        "sampling",
        "balancer",
        "size",
        "loss order",
        "policy",
        "program",
        "setting",
        "version",
        "machine",
    ],
)
def test_a_change_is_named_with_what_survives_it(changes, settings, survives):
    for saved, now in ((build(), build(**changes)), (build(**changes), build())):
        differences = contract.compare(read_back(saved), now)
        assert [difference.setting for difference in differences] == settings
        assert contract.surviving(differences) == survives


def own_key_hidden(step):
    return {}


@pytest.mark.parametrize(
    "changes",
    [
        {"root": None},
        {"training": training(program=None)},
        {"training": training(losses=None)},
        {"training": training(program=ABSENT)},
    ],
    ids=["root", "program", "losses", "no program yet"],
)
def test_what_one_side_does_not_know_is_not_compared(changes):
    for saved, now in ((build(), build(**changes)), (build(**changes), build())):
        assert contract.compare(read_back(saved), now) == []


def test_the_key_of_a_source_is_compared_where_both_sides_know_it():
    other = NamedBatchSource(source().samplers, source().batch_sizes, OTHER.sampling)
    (difference,) = contract.compare(read_back(build()), build(source=other))
    assert (difference.setting, difference.survives) == ("keys.source", "none")
    hidden = build(source=own_key_hidden)
    assert "source" not in hidden["keys"]
    assert {d.setting.split(".")[0] for d in contract.compare(read_back(build()), hidden)} == {"source"}


def test_lineage_is_carried_and_never_compared():
    saved, now = build() | {"run": {"id": "one", "parent_step": 3}}, build() | {"run": {"id": "two"}}
    assert contract.compare(read_back(saved), now) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"environment": elsewhere("versions", jax="0.0.1")}, "versions.jax"),
        ({"environment": elsewhere("versions", jaxlib="0.0.1")}, "versions.jaxlib"),
        ({"environment": elsewhere("settings", jax_default_matmul_precision="x")}, "settings.jax"),
        ({"environment": elsewhere("machine", platform="gpu")}, "machine.platform"),
        ({"environment": elsewhere("machine", devices=8)}, "machine.devices"),
        ({"source": source(pde=9)}, "source.samplers.pde.size"),
        ({"environment": elsewhere("settings", XLA_FLAGS="--x")}, None),
        ({"environment": elsewhere("versions", numpy="0.0.1")}, None),
        ({"environment": elsewhere("machine", cores=99)}, None),
        ({"training": training(program="2" * 64, on_nonfinite="skip")}, None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_program_that_had_to_change_is_not_compared(changes, reason):
    now = build(**{"training": training(program="2" * 64)} | changes)
    differences = {d.setting: d for d in contract.compare(read_back(build()), now)}
    program = differences["training.program"]
    if reason is None:
        assert (program.survives, program.current) == ("batches", "2" * 64)
    else:
        assert program.survives == "rounding"
        assert re.match(f"not comparable, since {reason}.* differs$", program.current)


def test_a_program_that_stayed_is_not_named():
    now = build(environment=elsewhere("versions", jax="0.0.1"))
    assert [d.setting for d in contract.compare(read_back(build()), now)] == ["versions.jax"]


def test_reordered_samplers_differ_in_their_order_alone():
    reordered = NamedBatchSource(
        dict(reversed(source().samplers.items())), source().batch_sizes, STREAMS.sampling
    )
    (difference,) = contract.compare(read_back(build()), build(source=reordered))
    assert (difference.setting, difference.survives) == ("source.samplers.order", "keys")
    assert str(difference) == (
        'source.samplers.order: ["bc", "pde", "ic"] in the checkpoint, ["ic", "pde", "bc"] in this run'
    )


def test_an_appended_sampler_is_absent_in_the_checkpoint():
    samplers = source().samplers | {"late": RandomRowSampler(ROWS)}
    appended = NamedBatchSource(samplers, source().batch_sizes | {"late": 1}, STREAMS.sampling)
    differences = contract.compare(read_back(build()), build(source=appended))
    named = {difference.setting: difference.saved for difference in differences}
    assert named["source.samplers.late.size"] == "(absent)"
    assert contract.surviving(differences) == "keys"


def test_another_kind_of_sampler_and_other_options_are_seen():
    samplers = source().samplers
    for name, other in (
        ("bc", RandomRowSampler(ROWS)),
        ("bc", RandomRowSampler({"inputs": np.zeros((7, 2), np.float32)}, replace=False)),
        ("pde", UniformDomainSampler([(0.0, 1.0), (-1.0, 2.5)])),
        ("ic", SpaceTimeSampler(ROWS, (0.0, 0.6))),
        ("ic", RandomRowSampler(ROWS)),
    ):
        changed = NamedBatchSource(samplers | {name: other}, source().batch_sizes, STREAMS.sampling)
        differences = contract.compare(read_back(build()), build(source=changed))
        assert differences, other
        assert {d.setting.split(".")[2] for d in differences} == {name}
        assert contract.surviving(differences) == "keys"


def test_other_versions_leave_all_but_the_last_bits():
    other = build()
    other["versions"] = other["versions"] | {"jax": "0.0.1"}
    (difference,) = contract.compare(other, build())
    assert (difference.setting, difference.survives) == ("versions.jax", "rounding")
    assert difference.survives not in contract.REFUSED_LEVELS


def test_the_gravest_difference_comes_first_and_decides():
    differences = contract.compare(
        build(),
        build(
            environment=elsewhere("versions", numpy="0.0.1"),
            root=keys.root_key(8),
            training=training(losses=["pde"]),
            source=source(pde=9),
        ),
    )
    assert [difference.survives for difference in differences] == ["none", "keys", "batches", "rounding"]
    assert contract.surviving(differences) == "none"
    assert contract.surviving([]) == "exact"


def test_a_report_lists_each_difference_under_what_it_leaves():
    differences = contract.compare(build(), build(root=keys.root_key(8), source=source(pde=9)))
    assert contract.report(differences) == (
        "  this is another run:\n"
        "    keys.root: threefry2x32:0-7 in the checkpoint, threefry2x32:0-8 in this run\n"
        "  the keys stay, the batches differ:\n"
        "    source.samplers.pde.size: 4 in the checkpoint, 9 in this run"
    )


@pytest.mark.parametrize(("length", "shown"), [(64, "a" * 64), (65, "a" * 61 + "...")])
def test_a_long_value_is_cut(length, shown):
    difference = contract.Difference("settings.XLA_FLAGS", "a" * length, 7, "rounding")
    assert str(difference) == f"settings.XLA_FLAGS: {shown} in the checkpoint, 7 in this run"
    assert difference.saved == "a" * length


@dataclasses.dataclass
class Settings:
    rate: float
    names: tuple[str, ...]
    where: object


def test_a_part_without_a_description_is_told_by_its_class_and_settings():
    part = contract.describe_part(Settings(0.5, ("a", "b"), {"mode": Settings}))
    assert part == {
        "kind": f"{__name__}.Settings",
        "rate": 0.5,
        "names": ["a", "b"],
        "where": {"mode": "Settings"},
    }


def test_contents_are_told_apart_by_a_single_bit():
    def contents(rows):
        samplers = {"bc": RandomRowSampler({"inputs": rows}), "ic": RandomRowSampler(ROWS)}
        sizes = {"bc": 3, "ic": 3}
        return contract.digest_contents(NamedBatchSource(samplers, sizes, STREAMS.sampling))

    before, other = contents(ROWS["inputs"]), contents(-ROWS["inputs"])
    assert before == contents(ROWS["inputs"].copy())
    (difference,) = contract.compare({"contents": before}, {"contents": other})
    assert (difference.setting, difference.survives) == ("contents.bc", "keys")
    assert contract.digest_contents(own_key_hidden) == {}


def test_a_source_that_does_not_describe_itself_is_named_by_its_type():
    record = build(source=build)
    assert record["source"] == {"kind": "builtins.function"}
    (difference,) = [d for d in contract.compare(build(), record) if d.setting == "source.kind"]
    assert difference.survives == "keys"


# On disk


def test_what_dumps_made_loads_gives_back():
    assert document.loads(read_back(document.dumps(build())), "step 3 in /run") == read_back(build())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda data: data["contract"]["keys"].update(root=None),
            "does not match its SHA-256: it was damaged or edited. Restore another step.",
        ),
        (
            lambda data: data.update(sha256="0" * 64),
            "does not match its SHA-256: it was damaged or edited. Restore another step.",
        ),
        (lambda data: data.pop("sha256"), "was not written by phijax_rng. Restore another step."),
        (lambda data: data.update(more=1), "was not written by phijax_rng. Restore another step."),
    ],
    ids=["edited", "another digest", "no digest", "more"],
)
def test_a_damaged_contract_is_damage_and_never_a_changed_run(damage, message):
    data = read_back(document.dumps(build()))
    damage(data)
    with pytest.raises(
        DamagedCheckpointError, match=f"^{re.escape(f'the contract of step 3 in /run {message}')}$"
    ):
        document.loads(data, "step 3 in /run")


@pytest.mark.parametrize("data", [None, [], "text", 5])
def test_what_is_no_record_is_damage(data):
    with pytest.raises(DamagedCheckpointError, match="was not written by phijax_rng"):
        document.loads(data, "step 3 in /run")


def test_a_contract_of_another_schema_says_which_version_reads_it():
    data = document.dumps(build() | {"schema": 99})
    message = (
        "step 3 in /run was written by a newer version of phijax_rng, with schema 99; this version reads "
        "1 to 2. Update phijax_rng, or name an older step."
    )
    with pytest.raises(CheckpointMismatchError, match=f"^{re.escape(message)}$"):
        document.loads(data, "step 3 in /run")


def test_the_digest_does_not_depend_on_the_order_of_keys():
    shuffled = dict(reversed(build().items()))
    assert document.dumps(shuffled)["sha256"] == document.dumps(build())["sha256"]


class Scheduled:
    """A balancer of a user, as far as the contract describes it."""

    def __init__(self, every):
        self.update_every_n_steps = every


class Describing(Scheduled):
    def describe(self):
        return {"kind": "own", "strength": 2}


def test_the_schedule_of_a_balancer_of_ones_own_is_part_of_the_contract():
    kind = f"{__name__}.Scheduled"
    assert contract.describe_part(Scheduled(5)) == {"kind": kind, "update_every_n_steps": 5}
    assert contract.describe_part(Describing(5)) == {"update_every_n_steps": 5, "kind": "own", "strength": 2}

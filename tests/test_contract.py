import json
import re

import numpy as np
import pytest

from phijax_rng import (
    DamagedCheckpointError,
    NamedBatchSource,
    RandomRowSampler,
    SpaceTimeSampler,
    UniformDomainSampler,
    contract,
    keys,
)

STREAMS = keys.split_root(7)
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
        "loss_names": ("pde", "bc"),
        "run": {"id": "one", "parent_step": None},
    }
    return contract.build(**arguments | changes)


def read_back(record):
    return json.loads(json.dumps(record))


def test_a_contract_that_was_read_back_differs_in_nothing():
    assert contract.compare(read_back(build()), build()) == []


def test_a_contract_holds_fingerprints_sources_losses_and_versions():
    record = build()
    assert set(record) == {"schema", "derivation", "keys", "source", "losses", "versions", "run"}
    assert record["keys"]["root"] == "threefry2x32:0-7"
    assert record["keys"]["sampling"] == keys.fingerprint(STREAMS.sampling)
    assert record["keys"]["balancer"] == keys.fingerprint(STREAMS.balancer)
    assert [sampler["name"] for sampler in record["source"]["samplers"]] == ["bc", "pde", "ic"]
    assert record["losses"] == ["pde", "bc"]
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
        ({"loss_names": ("bc", "pde")}, ["losses"], "batches"),
        ({"loss_names": None}, ["losses"], "batches"),
        ({"run": {"id": "two"}}, [], "exact"),
        ({"root": None}, [], "exact"),
    ],
    ids=["root", "sampling", "balancer", "size", "loss order", "losses unknown", "run", "root unknown"],
)
def test_a_change_is_named_with_what_survives_it(changes, settings, survives):
    for saved, now in ((build(), build(**changes)), (build(**changes), build())):
        differences = contract.compare(read_back(saved), now)
        assert [difference.setting for difference in differences] == settings
        assert contract.surviving(differences) == survives


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
        build(), build(root=keys.root_key(8), loss_names=("pde",), source=source(pde=9))
    )
    assert [difference.survives for difference in differences] == ["none", "keys", "batches"]
    assert contract.surviving(differences) == "none"
    assert contract.surviving([]) == "exact"


def test_a_report_lists_each_difference_under_what_it_leaves():
    differences = contract.compare(build(), build(root=keys.root_key(8), source=source(pde=9)))
    assert contract.report(differences) == (
        "  the keys stay, the batches differ:\n"
        "    source.samplers.pde.size: 4 in the checkpoint, 9 in this run\n"
        "  this is another run:\n"
        "    keys.root: threefry2x32:0-7 in the checkpoint, threefry2x32:0-8 in this run"
    )


def test_a_source_that_does_not_describe_itself_is_named_by_its_type():
    record = build(source=build)
    assert record["source"] == {"kind": "builtins.function"}
    (difference,) = [d for d in contract.compare(build(), record) if d.setting == "source.kind"]
    assert difference.survives == "keys"


# On disk


def test_what_dumps_made_loads_gives_back():
    assert contract.loads(read_back(contract.dumps(build())), "step 3 in /run") == read_back(build())


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
        (lambda data: data.pop("sha256"), "is not one of phijax_rng. Restore another step."),
        (lambda data: data.update(more=1), "is not one of phijax_rng. Restore another step."),
    ],
    ids=["edited", "another digest", "no digest", "more"],
)
def test_a_damaged_contract_is_damage_and_never_a_changed_run(damage, message):
    data = read_back(contract.dumps(build()))
    damage(data)
    with pytest.raises(
        DamagedCheckpointError, match=f"^{re.escape(f'the contract of step 3 in /run {message}')}$"
    ):
        contract.loads(data, "step 3 in /run")


@pytest.mark.parametrize("data", [None, [], "text", 5])
def test_what_is_no_record_is_damage(data):
    with pytest.raises(DamagedCheckpointError, match="is not one of phijax_rng"):
        contract.loads(data, "step 3 in /run")


def test_a_contract_of_another_schema_says_which_version_reads_it():
    data = contract.dumps(build() | {"schema": 99})
    message = (
        "the contract of step 3 in /run has schema 99, and this version reads 1. "
        "Use the version of phijax_rng that wrote it."
    )
    with pytest.raises(DamagedCheckpointError, match=f"^{re.escape(message)}$"):
        contract.loads(data, "step 3 in /run")


def test_the_digest_does_not_depend_on_the_order_of_keys():
    shuffled = dict(reversed(build().items()))
    assert contract.dumps(shuffled)["sha256"] == contract.dumps(build())["sha256"]

"""Names that patterns match, and how findings are put together."""

import pytest

from phijax_rng.auditing import analysis, events, findings


@pytest.mark.parametrize(
    ("name", "pattern", "matches"),
    [
        ("root.balancer", "root.balancer", True),
        ("root.balancer.fold_in(0)", "root.balancer", True),
        ("root.balancer[1].fold_in(0)", "root.balancer", True),
        ("root.balancers", "root.balancer", False),
        ("root", "root.balancer", False),
        ("root.sampling.stream('sampler', 'pde')", "root.sampling.stream('sampler', *)", True),
        ("root.sampling.stream('mine', 'pde')", "root.sampling.stream('sampler', *)", False),
        ("key.split(3)[1]", "key.split(3)[1]", True),
        ("key.split(3)[2]", "key.split(3)[1]", False),
        ("key.split(3)[2]", "key.split(3)", True),
    ],
)
def test_a_pattern_matches_a_key_and_all_that_comes_from_it(name: str, pattern: str, matches: bool) -> None:
    assert findings.name_matches(name, pattern) is matches


def test_every_kind_has_a_fix_and_notes_are_kinds() -> None:
    assert set(findings.NOTES) < set(findings.FIXES)
    assert set(analysis._SENTENCES) < set(findings.FIXES)


def test_a_key_without_a_name_is_shown_as_keys_shows_it() -> None:
    import jax

    from phijax_rng import keys

    (bits,) = findings.bits_of(events.words_of(jax.random.key(5)))
    assert findings.fingerprint(bits) == keys.fingerprint(jax.random.key(5)) == "threefry2x32:0-5"

"""Fields of frozen dataclasses, set while an instance is made."""


def assign(instance: object, **values: object) -> None:
    """Sets fields of a frozen instance; for `__init__`, `__post_init__` and `__setstate__` alone."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)

"""What the trainer's arguments must be, checked before anything is traced."""

from typing import Any

from phijax_rng.training.balancing.adapter import adapt_balancer
from phijax_rng.training.module import DataModule, LossModule, require_mask


def require_module(module: Any, balancer: Any, *, combines: bool = True) -> None:
    """Raises unless there is a module, and a balancer or none that suits it.

    Args:
        module: a `LossModule`.
        balancer: a `LossBalancer`, or `None`.
        combines: whether the balancer combines the losses, or only has its state renewed.
    """
    if not isinstance(module, LossModule):
        raise TypeError(f"module must be a LossModule, got {module!r}. Build one from init and losses.")
    if balancer is not None:
        adapt_balancer(balancer).require_consistent(module.loss_names, alone=combines)


def require_optimizer(optimizer: Any) -> None:
    """Raises unless it is an Optax transformation, or like one."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(f"optimizer must offer init and update, got {optimizer!r}. Pass an Optax optimizer.")


def require_update(module: Any, optimizer: Any, train_step: Any, balancer: Any, microbatches: int) -> None:
    """Raises unless an optimizer or a train step can update a state, with a part in it for the balancer."""
    if train_step is None:
        require_module(module, balancer)
        require_optimizer(optimizer)
        return
    if adapt_balancer(balancer).schedule is not None:
        require_module(module, balancer, combines=False)
    elif balancer is not None:
        raise ValueError(
            "train_step combines the losses itself, and the balancer has nothing to update, got "
            f"{balancer!r}. Drop the balancer, or pass an optimizer."
        )
    if microbatches != 1:
        raise ValueError(
            f"microbatches={microbatches} cuts the batches of an optimizer's update, and train_step "
            "is another update. Cut them there, or pass an optimizer."
        )


def require_datamodule(datamodule: Any) -> None:
    """Raises unless batches can be had from it."""
    if not isinstance(datamodule, DataModule):
        raise TypeError(
            f"datamodule must offer train_batch_source(batch_keys, key), got {datamodule!r}. "
            "Use PoolDataModule."
        )


def require_masked(uneven: str, module: Any, train_step: Any = None) -> None:
    """Raises where batches are filled up and whoever computes the losses takes no mask."""
    if uneven != "pad":
        return
    if train_step is None:
        require_mask(module.losses, f"the losses of module {module.name!r} take")
    else:
        require_mask(train_step, "train_step takes")


def require_one(name: str, value: Any, other_name: str, other: Any) -> None:
    """Raises if both or neither are given."""
    if (value is None) == (other is None):
        given = "both" if value is not None else "neither"
        raise TypeError(f"pass one of {name} and {other_name}, got {given}.")

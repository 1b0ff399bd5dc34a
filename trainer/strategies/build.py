"""Strategy by name."""

from __future__ import annotations

import difflib
from typing import Any

from trainer.spec.errors import UsageError
from trainer.spec.run import STRATEGY_ALIASES
from trainer.strategies.base import TrainingStrategy, known_arguments
from trainer.strategies.ddp import DDPStrategy
from trainer.strategies.fsdp import FSDPFullStrategy, FSDPGradStrategy

STRATEGIES: dict[str, type[TrainingStrategy]] = {
    "ddp": DDPStrategy,
    "fsdp-grad": FSDPGradStrategy,
    "fsdp-full": FSDPFullStrategy,
}


def get_train_strategy(train_strategy: str, **arguments: Any) -> TrainingStrategy:
    """Build the strategy `train_strategy` from the constructor arguments of TrainingStrategy.

    Raises:
        UsageError: no such strategy, or an argument that the constructor does not know.
    """
    train_strategy = STRATEGY_ALIASES.get(train_strategy, train_strategy)
    if train_strategy not in STRATEGIES:
        raise UsageError(
            f"train.strategy={train_strategy!r} is not available", f"known: {', '.join(STRATEGIES)}"
        )
    known = known_arguments()
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise UsageError(f"get_train_strategy does not know the argument {name!r}", meant)
    return STRATEGIES[train_strategy](**arguments)

"""All mutations, by area."""

from __future__ import annotations

from tests.mutation.mutation import Mutation
from tests.mutation.table import (
    data,
    layers,
    library,
    metrics,
    models,
    packing,
    parallelize,
    planning,
    strangers,
    tools,
    training,
)

MUTATIONS: tuple[Mutation, ...] = (
    *library.MUTATIONS,
    *layers.MUTATIONS,
    *parallelize.MUTATIONS,
    *packing.MUTATIONS,
    *data.MUTATIONS,
    *planning.MUTATIONS,
    *models.MUTATIONS,
    *training.MUTATIONS,
    *metrics.MUTATIONS,
    *tools.MUTATIONS,
    *strangers.MUTATIONS,
)

"""transformers' BertForSequenceClassification on padded batches with an attention mask: what packing is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.bert import BertConfig
from models.bert.pretrained.library_config import settings_of
from tools.batches import split
from tools.finetune.recipe import FinetuneRecipe
from tools.finetune.task import Example
from tools.finetune.text_tasks import ClassifyTask


@dataclass(frozen=True, kw_only=True, eq=False)
class LibraryStep:
    loss: Tensor


class LibraryTrainer:
    """The library's model of the same configuration, with random weights; torch's fused AdamW, the same clipping.

    Args:
        slots: of a micro-batch, as the other modes have it.

    Raises:
        ValueError: the modern encoder or norms before the blocks, which the library's BERT does not have.
    """

    def __init__(
        self, task: ClassifyTask, recipe: FinetuneRecipe, config: BertConfig, device: torch.device, slots: int
    ) -> None:
        from transformers import BertConfig as LibraryConfig
        from transformers import BertForSequenceClassification

        if config.encoder != "classic" or config.norm != "post":
            raise ValueError(
                f'transformers has no BERT with encoder="{config.encoder}" and norm="{config.norm}". '
                'Leave "transformers" out of --modes.'
            )
        settings = settings_of(config, "BertForSequenceClassification", "fp32", labels=task.labels, problem="classify")
        self._model = BertForSequenceClassification(LibraryConfig.from_dict(settings)).to(device).train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=recipe.optimizer.lr,
            weight_decay=recipe.optimizer.weight_decay,
            fused=True,
        )
        self._clip, self._slots, self._device = recipe.optimizer.clip, slots, device
        self._type = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision.compute)

    def take(self, step: int, examples: Sequence[Example]) -> LibraryStep:
        total = torch.zeros((), device=self._device)
        for part in split([len(example.text.ids) for example in examples], self._slots, padded=True):
            loss = self._loss(examples[part], len(examples))
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return LibraryStep(loss=total)

    def _loss(self, examples: Sequence[Example], texts: int) -> Tensor:
        ids, types = (
            pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True).to(self._device)
            for rows in ([e.text.ids for e in examples], [e.text.types for e in examples])
        )
        lengths = torch.tensor([len(example.text.ids) for example in examples], device=self._device)
        mask = torch.arange(ids.shape[1], device=self._device) < lengths.unsqueeze(1)
        labels = torch.tensor(np.array([example.target for example in examples]), device=self._device)
        with torch.autocast(self._device.type, self._type or torch.bfloat16, enabled=self._type is not None):
            output = self._model(input_ids=ids, token_type_ids=types, attention_mask=mask.long(), labels=labels)
        loss: Tensor = output.loss * (len(examples) / texts)
        return loss

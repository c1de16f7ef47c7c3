"""Hidden states of the last request's prompts, for whoever reads them between two requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from steppe.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from steppe.runtime.executor import StepOutcome

__all__ = ["FINAL_LAYER", "HiddenStates"]

FINAL_LAYER = -1
"""Layer index that means the output of the final norm."""


class HiddenStates:
    """Buffers owned by a runtime, overwritten by the next request (seed 002). Actor thread only."""

    def __init__(self) -> None:
        self._layers: dict[int, npt.NDArray[np.float32]] = {}
        self.prefill_length = 0
        self.input_token_ids: list[list[int]] = []

    def check(self, layers: Sequence[int], num_layers: int) -> dict[int, str]:
        """Backend output names by layer index. Raises InvalidRequestError for no such layer."""
        names = {}
        for layer in layers:
            if not FINAL_LAYER <= layer <= num_layers:
                raise InvalidRequestError(
                    "hidden_layers", f"no layer {layer}, the model has {num_layers}"
                )
            names[layer] = "final_hidden" if layer == FINAL_LAYER else f"hidden[{layer}]"
        return names

    def clear(self) -> None:
        """Forget the last request."""
        self._layers.clear()
        self.prefill_length = 0
        self.input_token_ids = []

    def capture(
        self,
        outputs: Mapping[int, str],
        outcomes: Sequence[StepOutcome],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        """Gather what the founding prefill's steps returned, sequence by sequence."""
        self.input_token_ids = [list(prompt) for prompt in prompts]
        if not outputs:
            return
        self.prefill_length = max(len(prompt) for prompt in prompts)
        filled = [0] * len(prompts)
        for outcome in outcomes:
            row = 0
            for part in outcome.parts:
                index = part.sequence.seed.original_index
                count = len(part.token_ids)
                for layer, name in outputs.items():
                    states = outcome.output.hidden[name]
                    buffer = self._layers.get(layer)
                    if buffer is None:
                        shape = (len(prompts), self.prefill_length, states.shape[1])
                        buffer = self._layers[layer] = np.zeros(shape, np.float32)
                    start = filled[index]
                    buffer[index, start : start + count] = states[row : row + count]
                filled[index] += count
                row += count

    def layer(self, index: int) -> npt.NDArray[np.float32] | None:
        """One layer's states, or None if they were not asked for."""
        return self._layers.get(index)

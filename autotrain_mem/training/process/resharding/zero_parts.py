"""Puts whole tensors of the host into DeepSpeed's partitions: each rank takes its part of the flat float32 weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from autotrain_mem.support.errors import TrainingError
from autotrain_mem.training.process.resharding.names import OptimizerOrder, Weight, options_of
from autotrain_mem.training.process.resharding.parts import on_host, states_of
from autotrain_mem.training.process.resharding.saved import Saved


class ZeroParts:
    """A model under ZeRO.

    The optimizer steps on one flat tensor of each group (stages 1 and 2: ``single_partition_of_fp32_groups``) or
    subgroup (stage 3: ``fp32_partitioned_groups_flat``), of which a rank holds its part; and has no state before its
    first step (``deepspeed/runtime/zero: initialize_optimizer_states``).
    """

    def __init__(self, trainer: Any) -> None:
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        self._trainer, self._zero = trainer, trainer.model_wrapped.optimizer
        self._is_third = isinstance(self._zero, DeepSpeedZeroOptimizer_Stage3)
        if not self._is_third and not isinstance(self._zero, DeepSpeedZeroOptimizer):
            raise TrainingError(
                f"DeepSpeed's {type(self._zero).__name__} cannot go on with a checkpoint that is not DeepSpeed's.",
                hint="Resume as the run was begun.",
            )
        self._is_adam_of_torch = type(self._zero.optimizer).__module__.startswith("torch.optim")

    def put_weight(self, weight: Weight, saved: Saved) -> None:
        with on_host():
            whole = saved.weight(weight.saved_as)
        tensor = weight.tensor
        if self._is_third and hasattr(tensor, "ds_id"):
            from deepspeed.runtime.zero.partition_parameters import GatheredParameters

            with GatheredParameters([tensor], modifier_rank=0), torch.no_grad():
                if dist.get_rank() == 0:
                    tensor.data.copy_(whole)
        else:
            with torch.no_grad():
                tensor.data.copy_(whole)
        if tensor.requires_grad:
            flat, part, start = self._part(tensor, whole)
            with torch.no_grad():
                flat.narrow(0, start, part.numel()).copy_(part)

    def put_states(self, order: OptimizerOrder, numbers: Mapping[str, int], saved: Saved) -> None:
        parameters = dict(self._trainer.model.named_parameters())
        base, steps = self._zero.optimizer, set[float]()
        for name, whole in states_of(saved, numbers):
            steps |= {float(value) for key, value in whole.items() if key == "step"}
            for key, value in whole.items():
                if value.dim():
                    flat, part, start = self._part(parameters[name], value)
                    self._kept(key)[flat].narrow(0, start, part.numel()).copy_(part)
        for flat in self._flats():
            if steps and base.state[flat]:
                base.state[flat]["step"] = self._step(max(steps), flat)
        engine, state = self._trainer.model_wrapped, self._trainer.state
        engine.global_steps = state.global_step  # it names the next checkpoint's files
        all_options = [options for names, options in zip(order.groups, options_of(order, saved), strict=True) if names]
        for group, options in zip(base.param_groups, all_options, strict=True):
            group |= {name: options[name] for name in ("lr", "initial_lr") if name in options}

    def _kept(self, key: str) -> Mapping[torch.Tensor, torch.Tensor]:
        """The state of that name of every flat tensor, also of one that is padding alone."""
        states = {flat: self._zero.optimizer.state[flat] for flat in self._flats()}
        for flat, state in states.items():
            if key not in state:
                state[key] = torch.zeros_like(flat)
        return {flat: state[key] for flat, state in states.items()}

    def _step(self, step: float, flat: torch.Tensor) -> Any:
        """Writes a step as torch has it (``optim/adamw.py: _init_group``); DeepSpeed's own counts (``cpu_adam.py``)."""
        if not self._is_adam_of_torch:
            return int(step)
        is_fused = any(group.get("fused") or group.get("capturable") for group in self._zero.optimizer.param_groups)
        return torch.tensor(step, dtype=torch.float32, device=flat.device if is_fused else "cpu")

    def _part(self, parameter: Any, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The flat tensor that holds a parameter's part, that part of a whole one, and where it begins in the flat."""
        with on_host():
            flattened = whole.reshape(-1)
            if self._is_third:
                group, start, count = self._zero.grad_position[self._zero.get_param_id(parameter)]
                first = count * self._zero._get_param_partition_rank(parameter)
                flat = self._zero.fp32_partitioned_groups_flat[group]
                return flat, flattened[first : first + count], int(start)
            mapping = parameter._hp_mapping
            if mapping is None:  # none of it is this rank's
                return self._zero.single_partition_of_fp32_groups[0], flattened[:0], 0
            place, of_whole = mapping.hp_fragment_address, mapping.lp_fragment_address
            flat = self._zero.single_partition_of_fp32_groups[mapping.param_group_index]
            return flat, flattened.narrow(0, of_whole.start, of_whole.numel), int(place.start)

    def _flats(self) -> list[torch.Tensor]:
        return list(
            self._zero.fp32_partitioned_groups_flat if self._is_third else self._zero.single_partition_of_fp32_groups
        )

    def weight(self, weight: Weight) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        if not weight.tensor.requires_grad:
            return weight.tensor.detach()
        whole: torch.Tensor = safe_get_full_fp32_param(weight.tensor)
        return whole

    def steps(self) -> Iterator[float]:
        base = self._zero.optimizer
        yield from (float(base.state[flat]["step"]) for flat in self._flats() if "step" in base.state[flat])

    def states(self) -> int:
        """It has a state of each flat tensor, not of each parameter: counts all parameters where all flats have one."""
        base = self._zero.optimizer
        has_all = all(base.state.get(flat) for flat in self._flats() if flat.numel())
        return sum(parameter.requires_grad for parameter in self._trainer.model.parameters()) if has_all else 0

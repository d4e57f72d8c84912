"""Defines what planning needs to know about a model besides its rehearsal."""

from dataclasses import dataclass

from autotrain_mem.settings.knobs import Knobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Depths:
    """Holds the layers of two truncated copies to rehearse, and of the whole model that is extrapolated from them.

    It also serves for numbers of chunks of a loss.
    """

    short: int
    long: int
    whole: int
    period: int = 1
    """The number of layers after which their kinds repeat. The three numbers differ by multiples of it."""

    def __post_init__(self) -> None:
        assert 0 < self.short < self.long <= self.whole
        assert (self.long - self.short) % self.period == (self.whole - self.short) % self.period == 0

    @property
    def sees_held_back(self) -> bool:
        """Returns whether the shorter copy has enough layers to free the inputs that activation offloading keeps."""
        return self.short > LAYERS_HELD_BACK

    @property
    def copies(self) -> int:
        """Counts the periods that the longer copy has in addition to the shorter one."""
        return (self.long - self.short) // self.period

    @property
    def all_copies(self) -> int:
        """Counts the periods that the whole model has in addition to the shorter copy."""
        return (self.whole - self.short) // self.period


COPIES = 2
"""The number of periods by which the longer copy exceeds the shorter one: two, to compare one with the other."""
LAYERS_OF_FIXED_COST = 2
"""The fixed time of a rehearsal, in layers and rounded up: it takes 0.18 s, and a layer of Qwen2.5-0.5B takes 0.16 s
(full fine-tuning with gradient checkpointing, on one core of a server, ``scripts/expansion``)."""
LAYERS_HELD_BACK = 5
"""Activation offloading frees a layer's input at most this many layers later, after its copy to the host
(``trl/models/activation_offloading.py: OffloadActivations``, max_fwd_stash_size)."""
FEW_LOSS_CHUNKS, MORE_LOSS_CHUNKS = 3, 6
"""The chunks of a loss to rehearse in the shorter and in the longer copy: the first, the last, and one or four between.
The longer copy then has three more chunks but ``COPIES`` more periods of layers, so that the two are not confused."""
FEWEST_LOSS_CHUNKS = 8
"""The fewest chunks of a loss that is shortened: with fewer, shortening saves no time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPattern:
    """Describes how the layers of a model repeat."""

    layers: int
    period: int
    """The number of layers after which their kinds repeat: 1 if all are alike, 2 if two kinds alternate."""
    least: int = 1
    """The least number of layers to rehearse. It is 2 if another loop runs over all layers, whose first and last
    iterations differ from the rest, such as the router loss of a mixture of experts. It is larger if the first layers
    differ from the rest, as in Qwen3-VL."""
    tower: int = 0
    """The number of layers of the vision tower. A truncated copy keeps all of them."""

    def depths(self, *, held_back: int = 0, has_images: bool = False) -> Depths | None:
        """Chooses the numbers of layers to rehearse instead of the whole model; None if that would not be faster.

        With images the vision tower runs too, and its layers take at least as long as language layers: 1 and 3 layers
        of Qwen2.5-VL-3B take 1.5 times as long as all 36 (one row with an image of 1024 x 768). A tower is not
        shortened: Qwen2.5-VL's has 32 layers in periods of eight, and copies with 8 and 24 of them save nothing.

        Example: 1 and 3 of 24 layers; 2 and 6 of 26 layers of two kinds. ``held_back``: the layers that run before a
        layer's last block is freed. The shorter copy has more layers. ``has_images``: whether the rows have images."""
        short = self.period + self.layers % self.period
        while short <= held_back or short < self.least:
            short += self.period
        long = short + COPIES * self.period
        beside = LAYERS_OF_FIXED_COST + (self.tower if has_images else 0)
        if short + long + beside >= self.layers:
            return None
        return Depths(short=short, long=long, whole=self.layers, period=self.period)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Holds the facts that are read from a model's config and processor."""

    context_length: int | None
    """The most tokens that the model can attend to; None if the config does not state it."""
    is_quantized: bool
    """Whether the checkpoint holds quantized weights. They cannot be quantized again."""
    flash_attention: str | None = None
    """The command that installs ``flash_attention_2``; empty if it is installed, None if the card cannot run it."""
    takes_liger: bool = False
    """Whether a plan for a card of this machine may choose Liger's kernels by itself."""
    shares_tokens: bool = False
    """Whether all layers attend to all earlier tokens, as ring attention requires."""
    digest: str = ""
    """A digest of the configs of all models of the job. Jobs with the same digest share cached results."""
    pattern: LayerPattern | None = None
    """How the layers repeat; None if they do not, so that the whole model is rehearsed."""
    model_type: str = ""
    """The name of the architecture in the config, such as ``qwen2``; empty if unknown."""
    hidden_size: int | None = None
    """The elements of a token's hidden state; None if the config does not state it."""
    lora_targets: str | tuple[str, ...] | None = None
    """The modules that LoRA adapts by default; None if unknown."""
    adapted: str | None = None
    """The modules that a plan adapts when it turns LoRA on, as ``lora_target_modules`` takes them; None if unknown."""
    experts: tuple[str, ...] = ()
    """The parameters of fused experts, by the ends of their names; empty if a plan's LoRA cannot adapt them."""
    active_experts: int = 1
    """The number of experts that process each token."""
    adapter_width: int | None = None
    """The approximate parameters of a LoRA adapter of rank 1 on ``adapted``; None if the config does not fix them."""
    parameters: int | None = None
    """The model's number of parameters; None if the config does not determine it."""
    checkpoint_dtype: str | None = None
    """The dtype of the saved weights, such as ``bfloat16``; None if the config does not state it."""
    reads_images: bool = False
    """Whether rows with images can be rehearsed with the model (``trainers.pretrained: FAMILIES``)."""
    pixel_steps: tuple[int, ...] = ()
    """The areas in pixels to which the processor can limit images, largest first; empty if all images get one size."""
    enlarges_images: bool = False
    """Whether the processor enlarges small images to the size of large ones."""
    kv_heads: int | None = None
    """The number of key-value heads; None if the config does not state it, or if some layers cache other tensors."""
    kv_head_elements: int | None = None
    """The elements of the KV cache per token and head, over all layers; None if ``kv_heads`` is None."""

    def depths_for(self, knobs: Knobs, *, has_images: bool = False) -> Depths | None:
        """Chooses the numbers of layers to rehearse; None if the whole model must be rehearsed.

        With several processes the whole model is rehearsed: DDP's buckets do not align with layers, and FSDP's
        prefetching does not repeat regularly from layer to layer.
        """
        if self.pattern is None or knobs.has_group:
            return None
        held_back = LAYERS_HELD_BACK if knobs.activation_offloading else 0
        return self.pattern.depths(held_back=held_back, has_images=has_images)

"""Defines what planning needs to know about a model besides its rehearsal."""

from dataclasses import dataclass

from autotrain_mem.settings.knobs import Knobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Depths:
    """Holds three numbers of layers of one model: two to rehearse, and the whole, which is extrapolated from them.

    Numbers of chunks of a loss are held in the same way.
    """

    short: int
    long: int
    whole: int
    period: int = 1
    """Number of layers after which their kinds repeat; the depths differ by multiples of it."""

    def __post_init__(self) -> None:
        assert 0 < self.short < self.long <= self.whole
        assert (self.long - self.short) % self.period == (self.whole - self.short) % self.period == 0

    @property
    def sees_held_back(self) -> bool:
        """Returns whether the shorter run has enough layers to free what activation offloading holds back."""
        return self.short > LAYERS_HELD_BACK

    @property
    def copies(self) -> int:
        """Counts the periods by which the longer run exceeds the shorter one."""
        return (self.long - self.short) // self.period

    @property
    def all_copies(self) -> int:
        """Counts the periods by which the whole exceeds the shorter run."""
        return (self.whole - self.short) // self.period


COPIES = 2
"""Copies that the longer run has more than the shorter one: a single copy has none to compare it with."""

LAYERS_OF_FIXED_COST = 2
"""The fixed cost of a rehearsal, in layers: 0.18 s, where a layer of Qwen2.5-0.5B takes 0.16 s (full fine-tuning with
gradient checkpointing, on one core of a server, ``scripts/expansion``); rounded up."""

LAYERS_HELD_BACK = 5
"""Activation offloading frees a layer's input up to this many layers later, once it has been copied
(``trl/models/activation_offloading.py: OffloadActivations``, max_fwd_stash_size)."""

FEW_LOSS_CHUNKS, MORE_LOSS_CHUNKS = 3, 6
"""Chunks of a loss to rehearse instead of all, with few layers and with more: the first, the last, and one or four in
between. The longer run then has three more copies of a chunk, but ``COPIES`` more of a layer, so that the two are not
confused."""

FEWEST_LOSS_CHUNKS = 8
"""A loss with fewer chunks is rehearsed whole, since shortening it saves no time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPattern:
    """Describes how the layers of a model repeat."""

    layers: int
    period: int
    """Number of layers after which their kinds repeat: 1 if all are alike, 2 if every other one slides."""
    least: int = 1
    """Least number of layers to rehearse. It is 2 if something else loops over all layers, as the router loss of a
    mixture of experts does, whose first and last iterations differ from the others. It is more if the first layers
    differ from the others, as Qwen3-VL's do."""
    tower: int = 0
    """Layers of the vision tower, all of which a copy keeps."""

    def depths(self, *, held_back: int = 0, has_images: bool = False) -> Depths | None:
        """Chooses the depths to rehearse instead of the whole; None if that would not be faster.

        A layer of the tower, which only images go through, takes at least as long as a language layer: 1 and 3 layers
        of Qwen2.5-VL-3B take 1.5 times as long as all 36 (one row with an image of 1024 x 768). A tower is not
        shortened: Qwen2.5-VL's has 32 layers in periods of eight, so that 8 and 24 of them are as many as the whole.

        Example: 1 and 3 of 24 layers; 2 and 6 of 26 layers of two kinds.

        Args:
            held_back: Layers that pass before a layer's last block is freed; the shorter run has more.
            has_images: Whether the rows have images.
        """
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
    """Holds what is read from the model's config."""

    context_length: int | None
    """Tokens that the model can attend to; None if its config does not say."""
    is_quantized: bool
    """Whether the checkpoint holds quantized weights, which cannot be quantized again."""
    flash_attention: str = "it was not looked for"
    """Why a plan for a card of this machine may not choose ``flash_attention_2`` by itself; empty if it may."""
    shares_tokens: bool = False
    """Whether its layers attend to all earlier tokens, as ring attention requires."""
    digest: str = ""
    """A digest of the configs of all models of the job; models with the same digest share cached results."""
    pattern: LayerPattern | None = None
    """How its layers repeat; None if they do not, so that the model is rehearsed whole."""
    hidden_size: int | None = None
    """Width of its layers; None if the config does not say."""
    lora_targets: str | tuple[str, ...] | None = None
    """The modules that LoRA adapts by default; None if that was not asked."""
    adapted: str | None = None
    """The modules that a plan adapts when it turns LoRA on, as ``lora_target_modules`` takes them; None if unknown."""
    adapter_width: int | None = None
    """Approximate parameters of such an adapter for each of its ranks; None if the config does not say."""
    parameters: int | None = None
    """Number of its parameters; None if its config does not say."""
    checkpoint_dtype: str | None = None
    """The dtype of the saved weights: ``bfloat16``; None if the config does not say."""

    reads_images: bool = False
    """Whether rows with images can be rehearsed with it (``trainers.pretrained: FAMILIES``)."""
    pixel_steps: tuple[int, ...] = ()
    """Areas, in pixels, to which its processor can shrink images, largest first; empty if it makes them all equal."""
    enlarges_images: bool = False
    """Whether its processor enlarges small images to the size of others."""
    kv_heads: int | None = None
    """Number of key and value heads; None if the config does not say, or if not all layers keep them."""
    kv_head_elements: int | None = None
    """Elements of the KV cache per token and head, over all layers."""

    def depths_for(self, knobs: Knobs, *, has_images: bool = False) -> Depths | None:
        """Chooses the depths to rehearse instead of the whole model; None if the whole is to be rehearsed.

        With several processes it is the whole: DDP's buckets cut across layers irregularly, and FSDP's prefetching does
        not extend regularly to more layers.
        """
        if self.pattern is None or knobs.has_group:
            return None
        held_back = LAYERS_HELD_BACK if knobs.activation_offloading else 0
        return self.pattern.depths(held_back=held_back, has_images=has_images)

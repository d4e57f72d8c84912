"""ModelFacts holds what planning needs to know of a model beside what is rehearsed."""

from __future__ import annotations

from dataclasses import dataclass

from autotrain_mem.settings.knobs import Knobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Depths:
    """Holds three numbers of layers of one model: two to rehearse, and the whole that is extrapolated from them.

    Chunks of a loss are counted alike.
    """

    short: int
    long: int
    whole: int
    period: int = 1
    """After how many layers their kinds repeat; the depths differ by multiples of it."""

    def __post_init__(self) -> None:
        assert 0 < self.short < self.long <= self.whole
        assert (self.long - self.short) % self.period == (self.whole - self.short) % self.period == 0

    @property
    def sees_held_back(self) -> bool:
        """Returns whether the shorter run has layers enough to free what activation offloading holds back."""
        return self.short > LAYERS_HELD_BACK

    @property
    def copies(self) -> int:
        """Counts the periods that the longer has more than the shorter."""
        return (self.long - self.short) // self.period

    @property
    def all_copies(self) -> int:
        """Counts the periods that the whole has more than the shorter."""
        return (self.whole - self.short) // self.period


COPIES = 2
"""Copies that the longer run has more than the shorter one: a single copy would be equal to itself whatever it
holds."""

LAYERS_OF_FIXED_COST = 2
"""The fixed cost of a rehearsal, in layers: 0.18 s against 0.16 s for a layer of Qwen2.5-0.5B, full fine-tuning with
gradient checkpointing, on one core of a server (``scripts/expansion``); rounded up."""

LAYERS_HELD_BACK = 5
"""Activation offloading frees a layer's input as late as this many layers on, when it has been copied
(``trl/models/activation_offloading.py: OffloadActivations``, max_fwd_stash_size)."""

FEW_LOSS_CHUNKS, MORE_LOSS_CHUNKS = 3, 6
"""Chunks of a loss to rehearse in the place of all, with few layers and with more: a first one, a last one, and one or
four of those between. What chunks do comes in three copies then, and what layers do in ``COPIES``: neither is taken
for the other."""

FEWEST_LOSS_CHUNKS = 8
"""A loss with fewer chunks is rehearsed whole: no time would be saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPattern:
    """Describes how the layers of a model repeat."""

    layers: int
    period: int
    """After how many layers their kinds come again: 1 where all are alike, 2 where every other one slides."""
    least: int = 1
    """Layers that a rehearsal has at least: 2 where something beside the layers goes over all of them, as the loss of a
    mixture's routers does, whose first turn and last are unlike the others; or more where the first layers are unlike
    the others, as Qwen3-VL's are."""
    tower: int = 0
    """Layers of the vision tower beside them, all of which a copy has."""

    def depths(self, *, held_back: int = 0, has_images: bool = False) -> Depths | None:
        """Chooses what to rehearse in the place of the whole; None where that would not be faster.

        A layer of the tower, which only images go through, takes at least as long as one of these: 1 and 3 layers of
        Qwen2.5-VL-3B take 1.5 times as long as all 36 (one row with an image of 1024 x 768). A tower keeps its layers:
        Qwen2.5-VL's has 32 in periods of eight, so that 8 and 24 of them are as many as the whole.

        Example: 1 and 3 layers of 24; of 26 layers of two kinds, 2 and 6.

        Args:
            held_back: Layers that pass before a layer's last block is freed; the shorter run has more.
            has_images: The rows have some.
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
    """Tokens that the model can attend to; None when its config does not say."""
    is_quantized: bool
    """The checkpoint holds quantized weights, which cannot be quantized again."""
    flash_attention: str = "it was not looked for"
    """Why a plan for a card of this machine may not choose ``flash_attention_2`` by itself; empty when it may."""
    shares_tokens: bool = False
    """Whether its layers attend to all that came before, as ring attention does where processes share the tokens of a
    row."""
    digest: str = ""
    """A digest of the configs of all models of the job: what is known of one is known of its equals."""
    pattern: LayerPattern | None = None
    """How its layers repeat; None where they do not, so that it must be rehearsed whole."""
    hidden_size: int | None = None
    """Width of its layers; None where the config does not say."""
    lora_targets: str | tuple[str, ...] | None = None
    """The modules that LoRA adapts where none are named; None where that was not asked."""
    adapted: str | None = None
    """What a plan that turns LoRA on lets it adapt, as ``lora_target_modules`` takes it; None where that was not
    asked."""
    adapter_width: int | None = None
    """Parameters of an adapter on these for each of its ranks, about; None where the config does not tell."""
    parameters: int | None = None
    """How many it has; None where its config does not tell."""
    checkpoint_dtype: str | None = None
    """The dtype that the weights are saved in: ``bfloat16``; None where the config does not say."""

    reads_images: bool = False
    """Rows with images can be rehearsed with it (``trainers.pretrained: FAMILIES``)."""
    pixel_steps: tuple[int, ...] = ()
    """Areas to which its processor can be told to make larger images smaller, largest first, in pixels; empty where it
    makes all images equally large."""
    enlarges_images: bool = False
    """Whether its processor makes small images as large as others."""
    kv_heads: int | None = None
    """Heads of keys and values; None where the config does not say, or where not all layers keep them."""
    kv_head_elements: int | None = None
    """Elements that a token takes of the KV cache for each of these heads, in all layers."""

    def depths_for(self, knobs: Knobs, *, has_images: bool = False) -> Depths | None:
        """Chooses what to rehearse in the place of the whole model; None where the whole is to be rehearsed.

        Of several processes it is the whole: DDP's buckets hold layers together as it comes, and what FSDP gathers
        ahead has no plain continuation in more layers.
        """
        if self.pattern is None or knobs.has_group:
            return None
        held_back = LAYERS_HELD_BACK if knobs.activation_offloading else 0
        return self.pattern.depths(held_back=held_back, has_images=has_images)

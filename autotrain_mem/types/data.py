"""Defines the token lengths of a dataset, from which truncation and padding are computed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageProfile:
    """Describes the images of a dataset's rows, as the model's processor prepares them."""

    rows_by_images: Mapping[int, int]
    """Number of images in a row -> number of such rows."""
    rows_by_image_tokens: Mapping[int, int]
    """Number of image tokens in a row -> number of such rows."""
    rows_by_end: Mapping[int, int]
    """Position of a row's last image token, counted from 1 (0 without an image) -> number of such rows."""
    worst: tuple[str, ...]
    """The image sizes of the row with the most pixels after processing, each as ``"1024x768"`` (width x height)."""
    worst_elements: int = 0
    """The number of elements in the pixel tensors of the row with the most pixels."""

    def with_worst_of(self, others: "Sequence[ImageProfile]") -> "ImageProfile":
        """Returns a copy with the worst row and the last image end over all profiles, so that evaluated rows count."""
        worst = max((self, *others), key=lambda each: each.worst_elements)
        ends = {max((self, *others), key=lambda each: each.end).end: 0, **self.rows_by_end}
        return replace(self, worst=worst.worst, worst_elements=worst.worst_elements, rows_by_end=ends)

    @property
    def end(self) -> int:
        """Returns the smallest ``max_length`` that cuts no image."""
        return max(self.rows_by_end, default=0)

    def summary(self) -> "ImageSummary":
        """Returns the figures to show."""
        tokens = DataProfile(rows_by_length=self.rows_by_image_tokens)
        return ImageSummary(
            images=sum(images * rows for images, rows in self.rows_by_images.items()),
            rows_without=self.rows_by_images.get(0, 0),
            percentiles=tuple(tokens.percentile(share) for share in PERCENTILES),
            most=tokens.longest,
            worst=self.worst,
        )

    def rows_cut(self, limit: int) -> int:
        """Counts the rows in which ``max_length`` would cut an image."""
        return sum(rows for end, rows in self.rows_by_end.items() if end > limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Identifies the content of a dataset."""

    digest: str
    names_files: bool
    """Whether rows refer to other files, whose content can change although the data files do not change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataProfile:
    """Holds a histogram of the token lengths of a dataset's rows, after the trainer's own formatting.

    The sampler is assumed to draw rows at random without replacement, and rows to be padded to the longest of their
    batch. Not modelled: sampling grouped by length, ``pad_to_multiple_of`` and the smaller last batch.

    Example: ``DataProfile(rows_by_length={10: 99, 80: 1})`` has ``percentile(0.99) == 10``,
    ``truncated_rows_fraction(40) == 0.01``, ``expected_longest(2) == 11.4`` and ``padding_fraction(2)`` 6 %.
    """

    rows_by_length: Mapping[int, int]
    """Length in tokens -> number of rows. A pair counts with its longer sequence; online methods count the prompt."""
    longest_evaluated: int = 0
    """The length of the longest evaluated row, in tokens; 0 without evaluation data."""
    shorter_sides: Mapping[int, int] = field(default_factory=dict)
    """Pairs only: length of a pair -> tokens of the shorter sequences, summed over all pairs of that length. A batch
    holds both sequences of a pair, padded to the same length (``DataCollatorForPreference`` of
    trl/trainer/reward_trainer.py and dpo_trainer.py). Empty if a row is one sequence."""
    images: ImageProfile | None = None
    """The images of the rows; None if rows are text."""
    longest_prompt: int = 0
    """The length of the longest prompt, in tokens, if training also generates answers (GKD); else 0."""
    longest_answer: int = 0
    """The length of the longest answer, in tokens, if training also generates answers (GKD); else 0. ``max_length``
    cuts the prompt of a row, but one token of it must stay (``trl/experimental/utils.py: DataCollatorForChatML``)."""
    empty_rows: int = 0
    """The number of rows without a text, or without an answer (in online methods without a prompt)."""
    drops: bool = False
    """Whether rows above ``max_length`` are dropped, not cut (trl/trainer/reward_trainer.py: _prepare_dataset)."""

    @property
    def rows(self) -> int:
        return sum(self.rows_by_length.values())

    @property
    def tokens(self) -> int:
        """Counts the tokens of all rows; a pair counts with both sequences."""
        return self.kept_tokens(None)

    @property
    def longest(self) -> int:
        return max(self.rows_by_length)

    @property
    def least_length(self) -> int:
        """Returns the least ``max_length`` that cuts no image, keeps a row, and leaves a token of each prompt."""
        of_images = 0 if self.images is None else self.images.end
        of_answers = self.longest_answer + 1 if self.longest_answer else 0
        return max(of_images, of_answers, min(self.rows_by_length) if self.drops else 0)

    def percentile(self, share: float) -> int:
        """Returns the smallest length that this share of the rows does not exceed (nearest rank): 0.999 for p99.9."""
        if not 0 < share <= 1:
            raise ValueError(f"a share of rows is above 0 and at most 1, not {share}")
        rank = math.ceil(round(share * self.rows, 6))  # as a float, 0.07 * 100 is a little more than 7
        counted = 0
        for length, rows in sorted(self.rows_by_length.items()):
            counted += rows
            if counted >= rank:
                return length
        return self.longest

    def asked_length(self, share: float) -> int:
        """Returns the ``max_length`` that keeps this share of rows whole; a share of 1 includes the evaluated rows."""
        return max(self.longest, self.longest_evaluated) if share == 1 else self.percentile(share)

    def truncated_rows(self, limit: int | None) -> int:
        """Counts the rows longer than ``max_length`` tokens."""
        if limit is None:
            return 0
        return sum(rows for length, rows in self.rows_by_length.items() if length > limit)

    def truncated_rows_fraction(self, limit: int | None) -> float:
        """Computes the share of rows longer than ``max_length`` tokens."""
        return self.truncated_rows(limit) / self.rows

    def truncated_tokens_fraction(self, limit: int | None) -> float:
        """Computes the share of tokens that ``max_length`` drops or cuts."""
        return 1 - self.kept_tokens(limit) / self.tokens if self.truncated_rows(limit) else 0.0

    def kept_tokens(self, limit: int | None) -> int:
        """Counts the tokens of an epoch that ``max_length`` leaves, without padding.

        The count is exact except for truncated pairs: the shorter sides of equally long pairs are taken as equal.
        """
        return sum(
            min(length, most) * rows + min(self.shorter_sides.get(length, 0), most * rows)
            for length, rows, most in self._kept(limit)
        )

    def expected_longest(self, rows: int, limit: int | None = None) -> float:
        """Computes the mean length, in tokens, of a batch's longest row; 0 if ``max_length`` drops all rows.

        If n of all N rows do not exceed a length, the probability that no row of a batch exceeds it is C(n, rows) /
        C(N, rows).
        """
        kept = {length: count for length, count, _ in self._kept(limit)}
        total = sum(kept.values())
        drawn = min(rows, total)

        def log_ways(count: int) -> float:
            return math.lgamma(count + 1) - math.lgamma(count - drawn + 1)

        expected, within, below = 0.0, 0, 0.0
        for length in sorted(kept):
            within += kept[length]
            chance = math.exp(log_ways(within) - log_ways(total)) if within >= drawn else 0.0
            expected += (chance - below) * min(length, limit or length)
            below = chance
        return expected

    def padding_fraction(self, rows: int, limit: int | None = None) -> float:
        """Computes the share of padding tokens in an epoch with batches of ``rows`` rows.

        In online methods it covers the prompts only: completions do not exist before they are sampled.
        """
        kept = sum(count for _, count, _ in self._kept(limit))
        padded = self.expected_longest(rows, limit) * kept * (2 if self.shorter_sides else 1)
        return max(0.0, 1 - self.kept_tokens(limit) / padded) if padded else 0.0

    def kept_lengths(self, limit: int | None) -> dict[int, int]:
        """Counts the trained rows by their length in tokens after truncation."""
        kept: dict[int, int] = {}
        for length, rows, most in self._kept(limit):
            kept[min(length, most)] = kept.get(min(length, most), 0) + rows
        return kept

    def _kept(self, limit: int | None) -> list[tuple[int, int, int]]:
        """Lists (length, number of rows, most tokens that a sequence keeps) of all trained rows."""
        return [
            (length, rows, length if limit is None else limit)
            for length, rows in self.rows_by_length.items()
            if limit is None or length <= limit or not self.drops
        ]


PERCENTILES = (0.5, 0.95, 0.99, 0.999)
"""The shares of rows for which summaries show a length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSummary:
    """Summarizes the images of the trained rows."""

    images: int
    rows_without: int
    """The number of rows without an image."""
    percentiles: tuple[int, ...]
    """The image tokens of a row at each of :data:`PERCENTILES`."""
    most: int
    """The largest number of image tokens in a row."""
    worst: tuple[str, ...]
    """The image sizes of the row with the most pixels, each as ``"1024x768"`` (width x height)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    """Summarizes the lengths of the trained rows, in tokens, under a plan's ``max_length`` and micro-batch."""

    rows: int
    tokens: int
    longest: int
    percentiles: tuple[int, ...]
    """The length of a row, in tokens, at each of :data:`PERCENTILES`."""
    padding_fraction: float
    """The mean share of padding tokens in a micro-batch; 0 if rows are not padded."""
    truncated_rows_fraction: float
    truncated_tokens_fraction: float
    images: ImageSummary | None = None
    """The images of the rows; None if rows are text."""


def summary(profile: DataProfile, *, limit: int | None, rows: int, pads: bool) -> DataSummary:
    """Summarizes a profile under a plan.

    Args:
        limit: The plan's ``max_length``, in tokens.
        rows: The number of rows in a micro-batch.
        pads: Whether a micro-batch's rows are padded to its longest row.
    """
    return DataSummary(
        rows=profile.rows,
        tokens=profile.tokens,
        longest=profile.longest,
        percentiles=tuple(profile.percentile(share) for share in PERCENTILES),
        padding_fraction=profile.padding_fraction(rows, limit) if pads else 0.0,
        truncated_rows_fraction=profile.truncated_rows_fraction(limit),
        truncated_tokens_fraction=profile.truncated_tokens_fraction(limit),
        images=None if profile.images is None else profile.images.summary(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Counting:
    """Holds the progress of one pass over all rows while tokens are counted, such as formatting or tokenizing."""

    done: int
    rows: int
    doing: str
    """The name that the datasets library gives the pass: ``Tokenizing train dataset``."""

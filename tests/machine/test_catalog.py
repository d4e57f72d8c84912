"""Tests the tables of GPUs: the catalog and its lookup, what a process holds outside torch, and rents."""

import csv
import datetime
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from autotrain_mem.machine import catalog as module
from autotrain_mem.machine.catalog import catalog, named, recognise
from autotrain_mem.machine.overhead import COMMUNICATOR_BYTES, KERNELS_BYTES, overhead
from autotrain_mem.machine.prices import listed_prices, price_of, prices
from autotrain_mem.support.errors import UnknownGpuError, UsageError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types.hardware import MINIMUM_HEADROOM_BYTES, Hardware

ROUNDING_BYTES = 16 * MIB
"""Three sizes of an OOM message, each rounded to 0.01 GiB."""


def test_every_card_has_all_its_figures_and_says_where_they_are_from() -> None:
    names = [card.name for card in catalog()]
    assert names == sorted(set(names))
    for card in catalog():
        assert card.origin == "named"
        assert card.source.startswith(("memory seen: ", "memory derived: "))
        assert "; speed: " in card.source
        assert card.total_bytes == card.free_bytes > card.non_torch_bytes > 0
        rates = (card.fp16_flops_per_second, card.fp32_flops_per_second, card.host_link_bytes_per_second)
        assert all(rate is not None and rate > 0 for rate in (*rates, card.bandwidth_bytes_per_second))
        assert card.bf16_flops_per_second in (None, card.fp16_flops_per_second)
        # Ordinary cores do a half of it on GeForce, a quarter on workstation cards, an eighth before Ampere, a 16th on
        # A100 and H100.
        share = (card.fp16_flops_per_second or 0) / (card.fp32_flops_per_second or 1)
        nearest = min((2, 4, 8, 16, 32), key=lambda round_share, share=share: abs(share - round_share))  # type: ignore[misc]
        # 8 %: the sheets round, and quote tensor cores at another clock than ordinary ones (H100 SXM: 14.8 for 16);
        # H20's are cut down
        assert share == pytest.approx(nearest, rel=0.16 if card.name.startswith("h") else 0.08), card.name


def test_total_memory_is_a_little_less_than_the_marketed_one_and_derived_figures_are_right() -> None:
    totals = {row.hardware.name: row.hardware.total_bytes // MIB for row in module._cards()}
    for row in module._cards():
        # L4 and A10G lose 8 % to ECC kept in the same memory and to the driver; B200 is sold as 180 GB, decimal.
        assert 0.91 * row.marketed_gib * GIB < row.hardware.total_bytes < row.marketed_gib * GIB, row.hardware.name
        rule, _, text = row.hardware.source.removeprefix("memory ").partition(": ")
        words = text.split(";")[0].split()
        if rule == "derived" and words[0] == "as":
            assert row.hardware.total_bytes // MIB == totals[words[1]]
        elif rule == "derived":
            assert row.hardware.total_bytes // MIB == int(words[0]) - int(words[2].rstrip(","))
            assert words[3] in totals


def test_a_name_may_be_written_in_many_ways() -> None:
    written = {
        "RTX 3060": "rtx3060",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "rtx_4070_ti_super": "rtx4070tisuper",
        "RTX 3090 24GB": "rtx3090",
        "A100 80GB": "a100-80gb",
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "Tesla T4": "t4",
        "A6000": "rtx-a6000",
        "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
        "RTX PRO 6000": "rtx-pro-6000-blackwell",
        "H100 SXM": "h100-80gb",
        "RTX 4060 Laptop GPU": "rtx4060-laptop",
        "rtx 2070 max-q": "rtx2070-max-q",
        "2080 Ti": "rtx2080ti",
    }
    assert {name: named(name).name for name in written} == written
    for row in module._cards():
        assert named(row.hardware.name.upper()).name == row.hardware.name


def test_a_size_is_an_imagined_card_with_a_context_if_a_real_one_is_as_small() -> None:
    for written, name, size_bytes, like in (
        *(("300MiB", "300MiB", 300 * MIB, None), ("0.5GiB", "0.5GiB", GIB // 2, None)),
        *((" 12 gib ", "12GiB", 12 * GIB, "rtx3080ti"), ("20GiB", "20GiB", 20 * GIB, "v100-16gb")),
    ):
        card, sizes = named(written), {"total_bytes": size_bytes, "free_bytes": size_bytes}
        held = {} if like is None else {"communicator_bytes": COMMUNICATOR_BYTES}
        held |= {"non_torch_bytes": 0 if like is None else named(like).non_torch_bytes}
        assert card == Hardware(name=name, origin="imagined", source=card.source, **sizes, **held)
        assert card.source.endswith("imagined by its size" if like is None else f"is assumed, as on {like}")


def test_the_error_for_an_unknown_or_ambiguous_name_has_the_nearest_ones() -> None:
    for written, meant in (
        ("a100", "--gpu a100-40gb or --gpu a100-80gb or --gpu a100-80gb-pcie"),
        ("H100", "--gpu h100-80gb or --gpu h100-nvl or --gpu h100-pcie"),
        ("RTX 4060 Ti", "--gpu rtx4060ti-16gb or --gpu rtx4060ti-8gb"),
        ("V100", "--gpu v100-16gb or --gpu v100-32gb"),
        ("rtx4099", "Did you mean rtx4090"),
        ("24", "Did you mean --gpu 24GiB?"),
        (" 7.5 G", "Did you mean --gpu 7.5GiB?"),
        ("", None),
        ("banana", None),
        ("-", None),
        ("24GB", "12GiB"),
        ("0GiB", None),
        ("16385GiB", None),
    ):
        with pytest.raises(UnknownGpuError) as refusal:
            named(written)
        assert meant is None or meant in refusal.value.hint, written
        assert ("Did you mean" in refusal.value.hint) == ("mean" in (meant or "")), written
        assert " or " in (meant or "") or written in ("24GB", "0GiB") or "autofit gpus" in refusal.value.hint, written


def test_a_detected_card_is_recognised_by_its_name_and_memory() -> None:
    for name, total_mib, key in (
        ("NVIDIA GeForce RTX 3080", 10002, "rtx3080"),
        ("NVIDIA GeForce RTX 3080", 12053, "rtx3080-12gb"),
        ("NVIDIA RTX A5000", 22721, "rtx-a5000"),  # with ECC on
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15929, "rtx4090-laptop"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 7753, "rtx3080-laptop-8gb"),
        ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", 5807, "rtx3050-laptop-6gb"),
        ("NVIDIA GeForce RTX 2070 with Max-Q Design", 7972, "rtx2070-max-q"),
        ("GeForce RTX 2080 Ti", 11020, "rtx2080ti"),
        ("NVIDIA RTX PRO 5000 Blackwell", 48356, "rtx-pro-5000-blackwell"),
        ("NVIDIA RTX PRO 5000 72GB Blackwell", 72836, "rtx-pro-5000-72gb-blackwell"),
        ("NVIDIA GeForce RTX 4095 Laptop GPU", 16000, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864, None),
    ):
        card = recognise(name, total_mib * MIB)
        assert (card and card.name) == key, name


def read(row: dict[str, str]) -> tuple[str, int, int]:
    """What a process did, its bytes outside torch, and as many as are predicted."""
    major, minor = map(int, row["compute_capability"].split("."))
    predicted = overhead(int(row["multiprocessors"]), (major, minor))
    assert predicted is not None
    outside_gib = float(row["in_use_gib"]) - float(row["allocated_gib"])
    return row["doing"], round(outside_gib * GIB - float(row["unallocated_mib"]) * MIB), predicted


def test_no_public_figure_is_above_the_rule_and_the_documented_accuracy_is_right() -> None:
    file = Path(module.__file__).with_name("overhead_figures.csv")
    figures = [read(row) for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines(), strict=True)]
    idle = [predicted - found for doing, found, predicted in figures if doing == "idle"]
    assert len(idle) == 3
    assert min(idle) >= KERNELS_BYTES
    found = [each for _, each, _ in figures]
    above = [predicted - each for _, each, predicted in figures]
    assert max(above) < 240 * MIB, "inference on an RTX 5090"
    assert 2 * KERNELS_BYTES < MINIMUM_HEADROOM_BYTES, "kernels that a run first uses after its probe fit"
    assert 0 <= min(above) < ROUNDING_BYTES  # the most found is what is planned for
    planned = statistics.median(each / size for each, size in zip(above, found, strict=True))
    assert planned == pytest.approx(0.35, abs=0.005)
    assert round(max(above) / MIB) == 235


def test_each_listed_price_has_its_source_and_a_file_replaces_the_table_with_its_lowest_prices(tmp_path: Path) -> None:
    table = listed_prices()
    assert len(table) > 10
    assert set(table) <= {card.name for card in catalog()}
    assert all(price.provider and price.source and price.currency == "USD" for price in table.values())
    assert all(datetime.date.fromisoformat(price.seen).year >= 2026 for price in table.values())
    assert all(0.1 < price.per_hour < 10 for price in table.values()), "of one card for one hour"
    card = replace(named("rtx4090"), name="NVIDIA GeForce RTX 4090", origin="detected")
    assert price_of(card, listed_prices()) == listed_prices()["rtx4090"]
    assert price_of(named("rtx2060"), listed_prices()) is price_of(named("24GiB"), listed_prices()) is None
    file = tmp_path / "prices.csv"
    file.write_text("gpu,per_hour,currency,seen\nRTX 4090,0.5,EUR,2026-11-01\nrtx4090, 0.4 ,EUR,\n8GiB,1,EUR,\n")
    table = prices(str(file))
    assert {name: price.per_hour for name, price in table.items()} == {"rtx4090": 0.4, "8GiB": 1.0}
    assert table["rtx4090"].currency == "EUR"
    assert prices(None) is listed_prices()


def test_an_invalid_file_of_prices_is_refused_with_the_format(tmp_path: Path) -> None:
    for text, said in (
        ("card,price\nl4,1\n", "has no column gpu and per_hour"),
        ("gpu,per_hour,eur\nl4,1,2\n", "has unknown columns: eur"),
        ("gpu,per_hour\nl4,$1\n", "line 2: per_hour '$1' is not a price"),
        ("gpu,per_hour\nl4,-1\n", "line 2: per_hour '-1' is not a price"),
        ("gpu,per_hour\nl4,nan\nnone,1\n", "line 3: No GPU is called 'none'"),
        ("gpu,per_hour\na100,1\n", "3 different cards are called 'a100'"),
        ("gpu,per_hour,seen\nl4,1,May\n", "seen 'May' is not a date"),
        ("gpu,per_hour,currency\nl4,1,USD\nl40s,1,EUR\n", "prices in EUR and USD cannot be compared"),
        ("gpu,per_hour\nl4\n", "line 2: the number of fields differs"),
        ('gpu,per_hour\n"l4,1\n', "is not a CSV file"),
        ("\udcff\udcfe\0", "is not a CSV file in UTF-8"),
    ):
        file = tmp_path / "prices.csv"
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
        with pytest.raises(UsageError) as raised:
            prices(str(file))
        assert said in raised.value.message, text
        assert "gpu,per_hour" in raised.value.hint, text
    for name, why in (("none.csv", "No such file"), ("", "directory")):
        with pytest.raises(UsageError, match=why):
            prices(str(tmp_path / name))
